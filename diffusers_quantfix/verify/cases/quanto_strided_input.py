"""A quanto layer gets a slice of a batch of sequences."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import quanto_models

    model = quanto_models.layers("qint8")
    torch.manual_seed(1)
    given = torch.randn(2, 6, 256)[:, 2:]
    with torch.no_grad():
        output, expected = model(given), model(given.contiguous())
    off = quanto_models.error(output, expected)
    assert output.shape == (2, 4, 128) and off < 1e-5, f"the output is off by {off}"
    return "the output is that of a contiguous input"
