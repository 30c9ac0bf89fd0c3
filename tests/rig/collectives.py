"""Collectives of gloo between processes, of tensors on the fake devices.

Gloo moves a GPU's tensors with code that only a CUDA build of torch has, and that asks CUDA's runtime library. Here
each operator does what it does for CPU tensors, over the same memory. Streams play no part in it: like gloo with CPU
tensors, ``wait()`` of what an operator returns waits until the values are there.
"""

from __future__ import annotations

import torch

from .undo import Undo

_OPERATORS = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "broadcast_",
    "gather_",
    "recv_",
    "recv_any_source_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "send",
)


def install(undo: Undo) -> None:
    """Let these operators take tensors of the devices."""
    if not torch.distributed.is_available():
        return
    ops = torch.ops.diffusers_quantfix_rig
    undo.call(ops.forget_host_kernels)
    for name in _OPERATORS:
        ops.use_host_kernel(f"c10d::{name}", "")
