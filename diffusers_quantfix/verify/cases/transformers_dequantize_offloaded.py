"""A 4-bit text encoder that is sequentially offloaded is dequantized."""

from __future__ import annotations


def case(work: str) -> str | None:
    from accelerate import cpu_offload

    from ..models import four_bit

    where = four_bit.device()
    model = cpu_offload(four_bit.text_encoder(f"{work}/plain", where), where)
    layers = list(model.modules())
    try:
        model.dequantize()
    except ValueError as refusal:
        assert "is offloaded, and dequantize() would leave it broken" in str(refusal), str(refusal)
    assert all(map(lambda one, other: one is other, model.modules(), layers)), "layers were replaced"
    return "raises an error, before anything is changed"
