"""A LoRA is merged into weights of quanto, and taken out again."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from peft import LoraConfig, get_peft_model

    from ..models import quanto_models

    torch.manual_seed(1)
    config = LoraConfig(r=8, target_modules=["0", "1"], init_lora_weights=False)
    model = get_peft_model(quanto_models.layers("qint8"), config).eval()
    with_lora = quanto_models.run(model)
    with model.disable_adapter():
        without = quanto_models.run(model)
    model.merge_adapter()
    merged = quanto_models.run(model)
    assert not torch.equal(merged, without), "merged, the output is that without a LoRA"
    off = quanto_models.error(merged, with_lora)
    assert off < 0.05, f"merged, off by {off:.3f} of the greatest output"
    model.unmerge_adapter()
    assert torch.equal(quanto_models.run(model), with_lora), "taken out again, it is not what it was"
    return f"merged it is off by {off:.3f} of the greatest output, which is the rounding; taken out, exact"
