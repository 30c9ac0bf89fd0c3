"""bitsandbytes >= 0.46 on the fake devices: its torch operators run their CPU kernels.

Where bitsandbytes hands CUDA other data than the CPU, or has kernels for CUDA only, there are stand-ins here. They
are CPU kernels of operators of our own, so that the backend checks the devices of their arguments and counts only
their results.
"""

from __future__ import annotations

import functools
import math
import re
import sys

import torch

from . import blockwise
from .accelerator import KEY
from .undo import Undo

_NAMESPACE = "bitsandbytes"
_OURS = "diffusers_quantfix_rig"


def install(undo: Undo) -> None:
    """Give every operator of an imported bitsandbytes a kernel for the devices."""
    ops = torch.ops.diffusers_quantfix_rig
    ours = torch.library.Library(_OURS, "FRAGMENT")
    theirs = torch.library.Library(_NAMESPACE, "IMPL")
    undo.call(ours._destroy)
    undo.call(theirs._destroy)
    undo.call(ops.forget_host_kernels)
    for qualified in _operators("bitsandbytes._ops" in sys.modules):
        name = qualified.partition("::")[2]
        if name in _STAND_INS:
            _stand_in(ours, theirs, name)
        elif _has_cpu_kernel(qualified):
            ops.use_host_kernel(*(f"{qualified}.".split(".")[:2]))


@functools.cache
def _operators(defined: bool) -> list[str]:
    """The names of bitsandbytes' operators, once they are defined; torch has thousands to look through."""
    if not defined:
        return []
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{_NAMESPACE}::")]


def _has_cpu_kernel(qualified: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(qualified, "CPU") or has_kernel(qualified, "CompositeExplicitAutograd")


def _stand_in(ours, theirs, name: str) -> None:
    packet, _, overload = name.partition(".")
    overload = overload or "default"
    schema = str(getattr(getattr(torch.ops.bitsandbytes, packet), overload)._schema)
    schema = re.sub(r"\(\$(\d+)! -> ?\)", r"(a\1!)", schema)  # "Tensor!" prints as "Tensor($0! -> )"
    ours.define(schema.removeprefix(f"{_NAMESPACE}::"))
    ours.impl(name, _STAND_INS[name], "CPU")
    theirs.impl(name, getattr(getattr(torch.ops.diffusers_quantfix_rig, packet), overload), KEY)


def _gemv_4bit(A, B, shapeB, absmax, code, blocksize):
    # The CPU kernel of 0.49+ wants the layout packed for AVX512; CUDA gets the plain one.
    indices = blockwise.unpack(B, shapeB[0] * shapeB[1])
    weight = blockwise.dequantize(indices, code, absmax, blocksize).view(*shapeB)
    return (A.float() @ weight.t()).to(A.dtype)


def _quantize_4bit(A, blocksize, quant_type, quant_storage):
    if quant_type != "fp4":
        return torch.ops.bitsandbytes.quantize_4bit(A, blocksize, quant_type, quant_storage)
    # Not all CPU kernels know fp4.
    indices, absmax = blockwise.quantize(A.reshape(-1), blockwise.CODES[quant_type], blocksize)
    return blockwise.pack(indices).view(quant_storage).unsqueeze(1), absmax


def _dequantize_4bit(A, absmax, blocksize, quant_type, shape, dtype):
    A = A.view(torch.uint8)  # CUDA takes every storage type, the CPU of 0.46 this one only
    if quant_type != "fp4":
        return torch.ops.bitsandbytes.dequantize_4bit(A, absmax, blocksize, quant_type, shape, dtype)
    indices = blockwise.unpack(A, math.prod(shape))
    code = blockwise.CODES[quant_type]
    return blockwise.dequantize(indices, code, absmax, blocksize).view(*shape).to(dtype)


def _dequantize_blockwise(A, absmax, code, blocksize, dtype):
    return torch.ops.bitsandbytes.dequantize_blockwise(A, absmax, code, blocksize, dtype)


def _int8_double_quant(A, threshold=0.0):
    rows, row_stats, outliers = torch.ops.bitsandbytes.int8_vectorwise_quant(A, threshold=threshold)
    small = A.float()
    if threshold > 0.0:
        small = small.masked_fill(small.abs() >= threshold, 0.0)
    column_stats = small.abs().amax(0)
    columns = (small * (127.0 / column_stats.clamp_min(1e-30))).round().to(torch.int8)
    return rows, columns, row_stats, column_stats, outliers


def _writing_to_out(function):
    def kernel(*args):
        *inputs, out = args
        out.copy_(function(*inputs))

    return kernel


_STAND_INS = {
    "gemv_4bit": _gemv_4bit,
    "gemv_4bit.out": _writing_to_out(_gemv_4bit),
    "quantize_4bit": _quantize_4bit,
    "dequantize_4bit": _dequantize_4bit,
    "dequantize_4bit.out": _writing_to_out(_dequantize_4bit),
    "dequantize_blockwise.out": _writing_to_out(_dequantize_blockwise),
    "int8_double_quant": _int8_double_quant,
}
