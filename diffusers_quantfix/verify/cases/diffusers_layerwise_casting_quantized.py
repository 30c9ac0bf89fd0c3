"""Layerwise casting must not change 4-bit weights packed as bfloat16."""

from __future__ import annotations


def case(work: str) -> str | None:
    import bitsandbytes as bnb
    import torch
    from diffusers.hooks import apply_layerwise_casting

    from ..models import four_bit

    where = four_bit.device(torch.bfloat16)
    torch.manual_seed(0)
    layers = [
        bnb.nn.Linear4bit(
            64, 64, quant_type="nf4", compute_dtype=torch.bfloat16, quant_storage=torch.bfloat16
        )
        for _ in range(2)
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 64)).to(where, torch.bfloat16)
    with torch.no_grad():
        given = torch.randn(3, 64, dtype=torch.bfloat16, device=where)
        expected = model[:2](given)
    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16)
    with torch.no_grad():
        off = (model[:2](given) - expected).abs().max().item()
    assert model[2].weight.dtype == torch.float8_e4m3fn, "the plain layer was not cast"
    assert off == 0, f"maximum error of the 4-bit layers: {off:.2g}"
    return "the output of the 4-bit layers is exact; the plain layer is cast"
