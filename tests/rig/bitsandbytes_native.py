"""bitsandbytes < 0.46 on the fake devices: a stand-in for its native CUDA library.

It has the entry points of ``libbitsandbytes_cudaXXX.so`` with the same pointer arguments and computes on the memory
they point to. bitsandbytes' own Python code (device checks, quant states, autograd) runs unmodified.
"""

from __future__ import annotations

import math
import re
import sys
from ctypes import c_char

import torch

from .undo import Undo

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CODES = {
    "nf4": torch.tensor(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
            *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
            *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
            *(0.7229568362236023, 1.0),
        ]
    ),
    "fp4": torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12,
}


def install(undo: Undo) -> None:
    """Exchange the native library of an imported bitsandbytes that calls one for everything."""
    cextension = sys.modules.get("bitsandbytes.cextension")
    if cextension is None or "bitsandbytes._ops" in sys.modules:  # 0.46+ has torch operators, see bitsandbytes_ops
        return
    theirs, ours = cextension.lib, NativeLibrary()
    for name, module in list(sys.modules.items()):
        if name.startswith("bitsandbytes.") and vars(module).get("lib", ours) is theirs:
            undo.set(module, "lib", ours)
    # Code books that it keeps on whatever device asked first must not outlive the devices.
    undo.call(sys.modules["bitsandbytes.functional"].name2qmap.clear)


class NativeLibrary:
    """Answers ``lib.<entry point>(...)``; an entry point without a stand-in fails when it is called."""

    compiled_with_cuda = True

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        for pattern, function in _ENTRY_POINTS.items():
            if match := re.fullmatch(pattern, name):
                return _on_numbers(function, match.groupdict())

        def missing(*args):
            raise NotImplementedError(f"the rig has no stand-in for bitsandbytes' native {name}")

        return missing


def _on_numbers(function, kinds: dict):
    """Call ``function`` with plain numbers for ctypes values and pointers, and with what the name told (dtype...)."""

    @torch.no_grad()
    def entry_point(*args):
        return function(*(getattr(arg, "value", arg) for arg in args), **kinds)

    return entry_point


def _at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor over ``count`` elements of raw memory."""
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


# ---- blockwise 8-bit and 4-bit


def _quantize(code, A, absmax, out, blocksize, n, *stream, t, q=None):
    blocks = math.ceil(n / blocksize)
    values = torch.zeros(blocks * blocksize)
    values[:n] = _at(A, n, _DTYPES[t]).float()
    values = values.view(blocks, blocksize)
    scale = values.abs().amax(1)
    _at(absmax, blocks, torch.float32).copy_(scale)
    values = values / torch.where(scale > 0, scale, 1.0)[:, None]
    table = _CODES[q] if q else _at(code, 256, torch.float32)
    nearest = torch.cat([(part[..., None] - table).abs().argmin(-1) for part in values.split(512)])
    nearest = nearest.view(-1)[:n].to(torch.uint8)
    if q:
        nearest = torch.nn.functional.pad(nearest, (0, n % 2))
        nearest = (nearest[0::2] << 4) | nearest[1::2]
    _at(out, nearest.numel(), torch.uint8).copy_(nearest)


def _dequantize(code, A, absmax, out, blocksize, n, *stream, t, q=None):
    if q:
        values = _dequantized_4bit(A, absmax, blocksize, n, _CODES[q])
    else:
        values = _at(code, 256, torch.float32)[_at(A, n, torch.uint8).long()] * _scales(absmax, blocksize, n)
    _at(out, n, _DTYPES[t]).copy_(values)


def _gemv(m, n, k, A, B, absmax, code, out, lda, ldb, ldc, blocksize, *stream, t):
    weight = _dequantized_4bit(B, absmax, blocksize, m * k, _at(code, 16, torch.float32)).view(m, k)
    _at(out, m, _DTYPES[t]).copy_(weight @ _at(A, k, _DTYPES[t]).float())


def _dequantized_4bit(A, absmax, blocksize, n, table):
    packed = _at(A, (n + 1) // 2, torch.uint8)
    indices = torch.stack([packed >> 4, packed & 15], 1).view(-1)[:n].long()
    return table[indices] * _scales(absmax, blocksize, n)


def _scales(absmax, blocksize, n):
    return _at(absmax, math.ceil(n / blocksize), torch.float32).repeat_interleave(blocksize)[:n]


# ---- LLM.int8() with row-major weights (0.45)


def _int8_vector_quant(A, out, row_stats, threshold, rows, columns, *stream):
    values = _at(A, rows * columns, torch.float16).float().view(rows, columns)
    if threshold > 0:
        values = values.masked_fill(values.abs() >= threshold, 0.0)
    scale = values.abs().amax(1)
    _at(row_stats, rows, torch.float32).copy_(scale)
    quantized = (values * (127.0 / scale.clamp_min(1e-30))[:, None]).round().clamp(-127, 127)
    _at(out, rows * columns, torch.int8).copy_(quantized.view(-1))


def _int8_matmul(context, m, n, k, A, B, C, row_scale, lda, ldb, ldc, *stream):
    # cuBLAS is column-major: A is the weight [ldc, lda], B the activations [n, ldb], C their product [n, ldc].
    weight = _at(A, ldc * lda, torch.int8).view(ldc, lda).double()
    activations = _at(B, n * ldb, torch.int8).view(n, ldb).double()
    _at(C, n * ldc, torch.int32).copy_((activations @ weight.t()).view(-1))
    return 0


def _int8_dequantize(A, row_stats, column_stats, out, bias, rows, columns, *stream):
    values = _at(A, rows * columns, torch.int32).view(rows, columns).float()
    values = values * _at(row_stats, rows, torch.float32)[:, None] * _at(column_stats, columns, torch.float32)
    values = values / 127**2
    if bias:
        values = values + _at(bias, columns, torch.float16).float()
    _at(out, rows * columns, torch.float16).copy_(values.view(-1))


_ENTRY_POINTS = {
    r"get_context|get_cusparse": lambda: 1,
    r"cquantize_blockwise_(?P<t>fp32|fp16|bf16)(_(?P<q>nf4|fp4))?": _quantize,
    r"cdequantize_blockwise_(?P<t>fp32|fp16|bf16)(_(?P<q>nf4|fp4))?": _dequantize,
    r"cgemm_4bit_inference_naive_(?P<t>fp32|fp16|bf16)": _gemv,
    r"cint8_vector_quant": _int8_vector_quant,
    r"cigemmlt_32": _int8_matmul,
    r"cdequant_mm_int32_fp16": _int8_dequantize,
}
