"""A gradient is passed through a float32 layer of quanto under autocast in bfloat16."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from optimum.quanto import freeze, qfloat8, quantize

    layer = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    quantize(layer, weights=qfloat8)
    freeze(layer)
    inputs = torch.ones(2, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(inputs)
    output.sum().backward()
    assert inputs.grad is not None
    return "the input has a gradient"
