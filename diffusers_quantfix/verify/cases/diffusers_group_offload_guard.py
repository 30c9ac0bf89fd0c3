"""A quantized model that accelerate dispatched to one GPU is group-offloaded."""

from __future__ import annotations


def case(work: str) -> str | None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    from ..models import group_offload

    build = group_offload.layers(4)

    def dispatched(device):
        model = build(device)
        model.quantization_method = "bitsandbytes"
        return add_hook_to_module(model, AlignDevicesHook(execution_device=device, io_same_device=True))

    return group_offload.check(dispatched, group_offload.run)
