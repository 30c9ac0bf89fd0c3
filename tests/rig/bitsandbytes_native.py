"""bitsandbytes < 0.46 on the fake devices: a stand-in for its native CUDA library.

It has the entry points of ``libbitsandbytes_cudaXXX.so`` with the same pointer arguments and computes on the memory
they point to. bitsandbytes' own Python code (device checks, quant states, autograd) runs unmodified.
"""

from __future__ import annotations

import functools
import re
import sys
from types import ModuleType
from typing import Any

import torch

from . import blockwise, native_int8
from .native_memory import at
from .undo import Undo

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def install(undo: Undo) -> None:
    """Exchange the native library of an imported bitsandbytes that calls one for everything."""
    has_torch_operators = "bitsandbytes._ops" in sys.modules  # 0.46+, see bitsandbytes_ops
    cextension = sys.modules.get("bitsandbytes.cextension")
    if cextension is None or has_torch_operators:
        return
    theirs, ours = cextension.lib, NativeLibrary(cextension.lib)
    for module in _modules_of_theirs(len(sys.modules)):
        if vars(module).get("lib", ours) is theirs:
            undo.set(module, "lib", ours)


@functools.lru_cache(maxsize=1)
def _modules_of_theirs(modules: int) -> list[ModuleType]:
    """The modules of bitsandbytes; looked for again whenever there are more modules than before."""
    return [module for name, module in list(sys.modules.items()) if name.startswith("bitsandbytes.")]


MISSING = "the rig has no stand-in for bitsandbytes' native "


class NativeLibrary:
    """Answers ``lib.<entry point>(...)``; an entry point without a stand-in fails when it is called.

    Those for the CPU are the ones of the library itself, where it could be loaded.
    """

    compiled_with_cuda = True

    def __init__(self, theirs: Any = None) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        if "_cpu_" in name:
            if not hasattr(self._theirs, "_lib"):  # none, or what raises an error in its place
                raise AttributeError(MISSING + name)
            return getattr(self._theirs, name)
        for pattern, function in _ENTRY_POINTS.items():
            if match := re.fullmatch(pattern, name):
                return _on_numbers(function, match.groupdict())

        def missing(*args):
            raise NotImplementedError(MISSING + name)

        return missing


def _on_numbers(function, kinds: dict):
    """Call ``function`` with plain numbers for ctypes values and pointers, and with what the name told (dtype...)."""

    @torch.no_grad()
    def entry_point(*args):
        # A kernel comes behind the copies of its stream, which late devices may not have run yet.
        for device in range(torch.cuda.device_count()):
            torch.empty(0, device=f"cuda:{device}").zero_()
        return function(*(getattr(arg, "value", arg) for arg in args), **kinds)

    return entry_point


def _quantize(code, A, absmax, out, blocksize, n, *stream, dtype, kind):
    table = blockwise.CODES[kind] if kind else at(code, 256, torch.float32)
    indices, scale = blockwise.quantize(at(A, n, _DTYPES[dtype]), table, blocksize)
    indices = blockwise.pack(indices) if kind else indices
    at(out, indices.numel(), torch.uint8).copy_(indices)
    at(absmax, scale.numel(), torch.float32).copy_(scale)


def _dequantize(code, A, absmax, out, blocksize, n, *stream, dtype, kind):
    table = blockwise.CODES[kind] if kind else at(code, 256, torch.float32)
    indices = blockwise.unpack(at(A, (n + 1) // 2, torch.uint8), n) if kind else at(A, n, torch.uint8)
    values = blockwise.dequantize(indices, table, _scale(absmax, n, blocksize), blocksize)
    at(out, n, _DTYPES[dtype]).copy_(values)


def _gemv(m, n, k, A, B, absmax, code, out, lda, ldb, ldc, blocksize, *stream, dtype):
    indices = blockwise.unpack(at(B, (m * k + 1) // 2, torch.uint8), m * k)
    scale = _scale(absmax, m * k, blocksize)
    weight = blockwise.dequantize(indices, at(code, 16, torch.float32), scale, blocksize)
    at(out, m, _DTYPES[dtype]).copy_(weight.view(m, k) @ at(A, k, _DTYPES[dtype]).float())


def _scale(absmax, n, blocksize):
    return at(absmax, -(-n // blocksize), torch.float32)


_ENTRY_POINTS = {
    r"get_context|get_cusparse": lambda: 1,
    r"cquantize_blockwise_(?P<dtype>fp32|fp16|bf16)_?(?P<kind>nf4|fp4|)": _quantize,
    r"cdequantize_blockwise_(?P<dtype>fp32|fp16|bf16)_?(?P<kind>nf4|fp4|)": _dequantize,
    r"cgemm_4bit_inference_naive_(?P<dtype>fp32|fp16|bf16)": _gemv,
    **native_int8.ENTRY_POINTS,
}
