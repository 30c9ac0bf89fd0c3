"""Torchao weights are loaded with a dict as ``map_location``."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    from ..models import mapped

    layers = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
    quantize_(layers, Float8WeightOnlyConfig())
    return mapped.check({"float8": layers})
