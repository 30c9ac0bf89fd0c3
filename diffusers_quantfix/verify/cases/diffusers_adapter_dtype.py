"""A model with an 8-bit layer without a bias has a float32 LoRA."""

from __future__ import annotations


def case(work: str) -> str | None:
    import bitsandbytes as bnb
    import torch
    from diffusers import ModelMixin
    from peft import LoraConfig, inject_adapter_in_model

    class Model(ModelMixin):
        def __init__(self) -> None:
            super().__init__()
            self.to_q = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
            self.to_q.weight.data = self.to_q.weight.data.to(torch.int8)
            self.norm = torch.nn.LayerNorm(64, dtype=torch.bfloat16)

    model = Model().requires_grad_(False)
    assert model.dtype == torch.bfloat16, f"without a LoRA the dtype is {model.dtype}"
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["to_q"]), model)
    assert model.dtype == torch.bfloat16, f"with a LoRA the dtype is {model.dtype}"
    return "the dtype is that of the norm, with and without a LoRA"
