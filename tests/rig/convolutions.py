"""Depthwise convolutions, for which CUDA has operators of its own: on the fake devices the CPU's grouped ones run.

As in ``bitsandbytes_ops`` they are CPU kernels of operators of our own, so that the backend checks the devices of their
arguments and counts only their results.
"""

from __future__ import annotations

import torch

from .undo import Undo

_OURS = "diffusers_quantfix_rig"


def _depthwise_2d(self, weight, kernel_size, bias, stride, padding, dilation):
    return torch.nn.functional.conv2d(self, weight, bias, stride, padding, dilation, self.shape[1])


def _depthwise_3d(self, weight, kernel_size, bias, stride, padding, dilation):
    return torch.nn.functional.conv3d(self, weight, bias, stride, padding, dilation, self.shape[1])


_STAND_INS = {"_conv_depthwise2d": _depthwise_2d, "conv_depthwise3d": _depthwise_3d}


def install(undo: Undo) -> None:
    """Give torch's depthwise operators a kernel for the devices."""
    ours = torch.library.Library(_OURS, "FRAGMENT")
    theirs = torch.library.Library("aten", "IMPL")
    undo.call(ours._destroy)
    undo.call(theirs._destroy)
    for name, kernel in _STAND_INS.items():
        schema = str(getattr(torch.ops.aten, name).default._schema).removeprefix("aten::")
        ours.define(schema)
        ours.impl(name, kernel, "CPU")
        theirs.impl(name, getattr(torch.ops.diffusers_quantfix_rig, name).default, "CUDA")
