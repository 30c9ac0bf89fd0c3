"""A quanto model is moved while the outputs of a run with gradients are alive."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import quanto_models

    model = quanto_models.layers("qint8")

    def gradient(moves: bool) -> torch.Tensor:
        inputs = torch.ones(3, 256, requires_grad=True)
        loss = model(inputs).sum()
        if moves:
            model.cpu()
        loss.backward()
        return inputs.grad

    expected = gradient(moves=False)
    assert torch.equal(gradient(moves=True), expected), "the gradient differs"
    return "moved beside the graph, which gives the same gradient"
