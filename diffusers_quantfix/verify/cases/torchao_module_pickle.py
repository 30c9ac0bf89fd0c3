"""A model with torchao weights is written with ``torch.save``."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch
    from torchao import quantization

    layer = torch.nn.Linear(64, 64).bfloat16()
    # before torchao 0.9 these were functions
    config = getattr(quantization, "Int8WeightOnlyConfig", None) or quantization.int8_weight_only
    quantization.quantize_(layer, config())
    inputs = torch.ones(1, 64, dtype=torch.bfloat16)
    file = os.path.join(work, "layer.pt")
    torch.save(layer, file)
    assert torch.equal(torch.load(file, weights_only=False)(inputs), layer(inputs)), "the output differs"
    return "the layer is written and read"
