"""A model of 4-bit layers is moved to ``meta``."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Linear4bit

    from ..models import eight_bit

    model = torch.nn.Sequential(Linear4bit(64, 64, quant_type="nf4")).to(eight_bit.device())
    model.to("meta")
    assert type(model[0].weight).__name__ == "Params4bit", (
        f"the weight became a {type(model[0].weight).__name__}"
    )
    return "a 4-bit layer moved to meta is still one"
