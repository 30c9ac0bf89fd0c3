"""A model with torchao weights is moved in inference mode."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from torchao import quantization

    layer = torch.nn.Linear(64, 64).bfloat16()
    quantization.quantize_(layer, quantization.Float8WeightOnlyConfig())
    with torch.inference_mode():
        layer.to(torch.bfloat16)
        moved = layer.weight.to("meta")
    assert moved.device.type == "meta", f"the weight reports {moved.device}"
    return "the weight is where it was moved"
