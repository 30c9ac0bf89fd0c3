"""A LoKr is merged into weights of quanto, and taken out again."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from peft import LoKrConfig, get_peft_model

    from ..models import quanto_models

    torch.manual_seed(1)
    config = LoKrConfig(r=64, target_modules=["0", "1"], init_weights=False)
    model = get_peft_model(quanto_models.layers("qint8"), config).eval()
    with_lora = quanto_models.run(model)
    with model.disable_adapter():
        without = quanto_models.run(model)
    model.merge_adapter()
    merged = quanto_models.run(model)
    assert not torch.equal(merged, without), "after merging the output is that without the LoKr"
    off = quanto_models.error(merged, with_lora)
    assert off < 0.05, f"relative error after merging: {off:.3f}"
    model.unmerge_adapter()
    assert torch.equal(quanto_models.run(model), with_lora), "after unmerging the output is not what it was"
    return f"relative error {off:.3f} after merging, from rounding; exact after unmerging"
