"""A backward pass through quanto layers, with a gradient that is not contiguous."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import quanto_models

    layer = quanto_models.layers("qint8")[0]
    layer.weight.requires_grad_(True)
    inputs = torch.ones(3, 2, layer.in_features, requires_grad=True)
    output = layer(inputs)
    output.backward(torch.ones(2, 3, layer.out_features).transpose(0, 1))
    shapes = {"input": inputs.grad.shape, "weight": layer.weight.grad.shape}
    assert shapes == {"input": inputs.shape, "weight": layer.weight.shape}, f"the gradients: {shapes}"
    return "gradients of the input and of the weight"
