"""The ways in which people place a pipeline. Each takes (pipeline, here, there) and gives the device of the inputs.

``here`` is where the reference ran, ``there`` another device. After a run of the pipeline a placement of ``OFFLOADS``
must have left nothing of the model on a device.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fixes.callers import spelled


def _stay(pipe, here, there):
    return here


def _to(pipe, here, there):
    pipe.to(here)
    return here


def _there_and_back(pipe, here, there):
    pipe.to(here)
    pipe.to("cpu")
    pipe.to(here)
    return here


def _to_the_other(pipe, here, there):
    pipe.to(here)
    pipe.to(there)
    return there


def _model_offload(pipe, here, there):
    pipe.enable_model_cpu_offload(device=spelled(here))
    return here


def _sequential(pipe, here, there):
    pipe.enable_sequential_cpu_offload(device=spelled(here))
    return here


def _group(**options) -> Callable:
    def place(pipe, here, there):
        import torch

        pipe.transformer.enable_group_offload(
            onload_device=spelled(here), offload_device=torch.device("cpu"), **options
        )
        return here

    return place


def _model_offload_then_off(pipe, here, there):
    pipe.enable_model_cpu_offload(device=spelled(here))
    pipe.remove_all_hooks()
    pipe.to(here)
    return here


def _sequential_then_off(pipe, here, there):
    pipe.enable_sequential_cpu_offload(device=spelled(here))
    pipe.remove_all_hooks()
    pipe.to(here)
    return here


PLACEMENTS: dict[str, Callable] = {
    "stay": _stay,
    "to": _to,
    "there and back": _there_and_back,
    "to the other": _to_the_other,
    "model offload": _model_offload,
    "model offload, then off": _model_offload_then_off,
    "sequential": _sequential,
    "sequential, then off": _sequential_then_off,
    "group, leaf": _group(offload_type="leaf_level"),
    "group, leaf, stream": _group(offload_type="leaf_level", use_stream=True),
    "group, leaf, stream, low memory": _group(
        offload_type="leaf_level", use_stream=True, low_cpu_mem_usage=True
    ),
    "group, block": _group(offload_type="block_level", num_blocks_per_group=1),
    "group, block, stream": _group(offload_type="block_level", num_blocks_per_group=1, use_stream=True),
}

OFFLOADS = {"model offload", "sequential", *(name for name in PLACEMENTS if name.startswith("group"))}
