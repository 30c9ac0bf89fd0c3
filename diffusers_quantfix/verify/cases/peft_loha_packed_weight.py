"""A LoHa on a GGUF model."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import LoHaConfig

    from ..models import gguf_model, lora

    return lora.run_with(lora.pipeline(transformer=gguf_model.flux(work)), LoHaConfig)
