"""Layers that quanto quantized to int8 are group-offloaded, without and with a stream."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from optimum.quanto import freeze, qint8, quantize

    from ..models import group_offload

    def build(device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))).eval()
        quantize(model, weights=qint8)
        freeze(model)
        return model.to(device)

    group_offload.check(build, group_offload.run)
    return group_offload.check(build, group_offload.run, use_stream=True)
