"""Operators that accelerators have in a way of their own: on the fake devices those of the CPU do their work.

CUDA has depthwise convolutions apart, XPU one operator for all convolutions. Torch's int4 kernel for CUDA has had
another name than that for the CPU since torch 2.6; quanto asks for it where torch is built for CUDA.

As in ``bitsandbytes_ops`` they are CPU kernels of operators of our own, so that the backend checks the devices of their
arguments and counts only their results.
"""

from __future__ import annotations

import torch

from .accelerator import KEY
from .undo import Undo

_OURS = "diffusers_quantfix_rig"


def _depthwise_2d(self, weight, kernel_size, bias, stride, padding, dilation):
    return torch.nn.functional.conv2d(self, weight, bias, stride, padding, dilation, self.shape[1])


def _depthwise_3d(self, weight, kernel_size, bias, stride, padding, dilation):
    return torch.nn.functional.conv3d(self, weight, bias, stride, padding, dilation, self.shape[1])


def _to_int4pack(self, innerKTiles):
    """The bytes that the CPU packs, in the dtype and shape of CUDA, which callers look at."""
    values = torch.stack((self >> 4, self & 15), -1).flatten(1).to(torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(values, innerKTiles)
    rows, columns = values.shape
    return packed.view(torch.int32).view(rows // 8, columns // (innerKTiles * 16), 32, innerKTiles // 2)


def _int4pack_mm(self, mat2, qGroupSize, qScaleAndZeros):
    packed = mat2.view(-1, self.shape[1] // 8).view(torch.uint8)
    return torch._weight_int4pack_mm_for_cpu(self, packed, qGroupSize, qScaleAndZeros)


def _group_norm(input, weight, bias, *sizes):
    return torch.native_group_norm(input.contiguous(), weight, bias, *sizes)


_STAND_INS = {
    "_conv_depthwise2d": _depthwise_2d,
    "conv_depthwise3d": _depthwise_3d,
    "convolution_overrideable": torch.convolution,
}
if hasattr(torch, "_convert_weight_to_int4pack_for_cpu"):
    _STAND_INS |= {"_convert_weight_to_int4pack": _to_int4pack, "_weight_int4pack_mm": _int4pack_mm}
if torch.__version__.startswith("2.14."):  # CUDA's kernel takes any strides there, and is given them
    _STAND_INS["native_group_norm"] = _group_norm


def install(undo: Undo) -> None:
    """Give these operators of torch a kernel for the devices."""
    ours = torch.library.Library(_OURS, "FRAGMENT")
    theirs = torch.library.Library("aten", "IMPL")
    undo.call(ours._destroy)
    undo.call(theirs._destroy)
    for name, kernel in _STAND_INS.items():
        schema = str(getattr(torch.ops.aten, name).default._schema).removeprefix("aten::")
        ours.define(schema)
        ours.impl(name, kernel, "CPU")
        theirs.impl(name, getattr(torch.ops.diffusers_quantfix_rig, name).default, KEY)
