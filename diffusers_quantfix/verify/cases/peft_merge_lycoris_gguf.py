"""``merge_and_unload`` of a LoKr of a GGUF model raises an error, and changes nothing."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import LoKrConfig, get_peft_model

    from ..models import gguf_model

    config = LoKrConfig(r=4, target_modules=["to_q"], init_weights=False)
    model = get_peft_model(gguf_model.flux(work), config)
    try:
        model.merge_and_unload()
    except ValueError as refusal:
        assert "cannot be merged into GGUF weights" in str(refusal), str(refusal)
        return "raises an error that names dequantize(), before anything is merged"
    raise AssertionError("merged into packed bytes")
