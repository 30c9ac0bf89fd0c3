"""A LoKr on a GGUF model."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import LoKrConfig

    from ..models import gguf_model, lora

    return lora.run_with(lora.pipeline(transformer=gguf_model.flux(work)), LoKrConfig)
