"""A LoKr on meta is added to 8-bit layers."""

from __future__ import annotations


def case(work: str) -> str | None:
    import bitsandbytes as bnb
    import torch
    from peft import LoKrConfig, inject_adapter_in_model

    model = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)).requires_grad_(False)
    inject_adapter_in_model(LoKrConfig(r=64, target_modules=["0"]), model, low_cpu_mem_usage=True)
    assert model[0].lokr_w2["default"].is_meta and not model[0].base_layer.weight.is_meta
    return "the adapter waits for its weights"
