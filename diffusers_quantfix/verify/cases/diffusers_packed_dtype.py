"""A model begins with an 8-bit layer; its dtype must be the one that it computes in."""

from __future__ import annotations


def case(work: str) -> str | None:
    import bitsandbytes as bnb
    import torch
    from diffusers import ModelMixin

    class Model(ModelMixin):
        def __init__(self) -> None:
            super().__init__()
            self.to_q = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
            self.to_q.weight.data = self.to_q.weight.data.to(torch.int8)
            self.norm = torch.nn.LayerNorm(64, dtype=torch.bfloat16)

    dtype = Model().requires_grad_(False).to(torch.bfloat16).dtype
    assert dtype == torch.bfloat16, f"the dtype is {dtype}"
    return "the dtype is that of the norm"
