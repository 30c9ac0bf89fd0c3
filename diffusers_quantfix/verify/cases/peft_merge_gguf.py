"""``merge_adapter`` of a GGUF model raises an error, and changes nothing."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import LoraConfig, get_peft_model

    from ..models import gguf_model

    config = LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False)
    model = get_peft_model(gguf_model.flux(work), config)
    try:
        model.merge_adapter()
    except ValueError as refusal:
        assert "cannot be merged into GGUF weights" in str(refusal), str(refusal)
        return "raises an error that names dequantize(), before anything is merged"
    raise AssertionError("merged into packed bytes")
