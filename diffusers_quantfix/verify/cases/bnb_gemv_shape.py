"""A 4-bit layer computes a single row without a batch."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Linear4bit

    device = cuda("bitsandbytes before 0.46 computes 4-bit layers on a GPU only")
    torch.manual_seed(0)
    layer = Linear4bit(64, 128, compute_dtype=torch.float32, quant_type="nf4").to(device)
    row = torch.randn(64, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        output, expected = layer(row), layer(row[None])[0]
    assert output.shape == expected.shape, f"the shape is {tuple(output.shape)}, not {tuple(expected.shape)}"
    assert torch.equal(output, expected), "the output differs"
    return f"an output of shape {tuple(output.shape)}"
