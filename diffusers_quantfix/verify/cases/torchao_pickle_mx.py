"""A model with weights in the format NVFP4 is written with ``torch.save``."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
    from torchao.quantization import quantize_

    layer = torch.nn.Linear(64, 64).bfloat16()
    quantize_(layer, NVFP4WeightOnlyConfig())
    inputs = torch.ones(1, 64, dtype=torch.bfloat16)
    file = os.path.join(work, "layer.pt")
    torch.save(layer, file)
    assert torch.equal(torch.load(file, weights_only=False)(inputs), layer(inputs)), "the output differs"
    return "the layer is written and read"
