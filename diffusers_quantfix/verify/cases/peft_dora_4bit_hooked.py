"""A DoRA is added to a 4-bit layer with a diffusers hook that cannot be copied."""

from __future__ import annotations


def case(work: str) -> str | None:
    import sys

    import bitsandbytes as bnb
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    from ..case import CannotReproduce

    try:
        layer = bnb.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
        bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    except (AttributeError, AssertionError, ImportError, NotImplementedError, RuntimeError) as error:
        raise CannotReproduce(f"bitsandbytes does not quantize on this CPU: {error!r}") from None
    layer._diffusers_hook = sys  # group offloading's hook holds the module torch
    model = torch.nn.Sequential(layer).requires_grad_(False)
    config = LoraConfig(r=4, target_modules=["0"], use_dora=True)
    inject_adapter_in_model(config, model)
    assert layer._diffusers_hook is sys, "the hook of the layer is gone"
    return "the DoRA is there, and the hook too"
