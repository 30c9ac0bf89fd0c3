"""A 4-bit text encoder that is sequentially offloaded is dequantized."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    from ..models import four_bit

    where = four_bit.device()
    model = four_bit.text_encoder(work, where)
    expected = four_bit.encode(model, where)
    cpu_offload(model, where)
    try:
        model.dequantize()
    except ValueError as refusal:
        assert "is offloaded, and dequantize() would leave it broken" in str(refusal), str(refusal)
    assert torch.equal(four_bit.encode(model, where), expected), "the output is another one"
    return "a clear error, before anything is changed"
