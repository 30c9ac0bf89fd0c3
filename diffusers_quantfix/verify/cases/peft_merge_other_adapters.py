"""An HRA is merged into weights of quanto: has its effect, or an error says that it cannot."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from peft import HRAConfig, get_peft_model

    from ..models import quanto_models

    plain = quanto_models.layers("qint8")
    torch.manual_seed(1)
    model = get_peft_model(plain, HRAConfig(r=8, target_modules=["0", "1"], init_weights=False)).eval()
    before = quanto_models.run(model)
    try:
        model.merge_adapter()
    except ValueError as refusal:
        assert "cannot be merged into a" in str(refusal), str(refusal)
        assert torch.equal(quanto_models.run(model), before), "it was merged in part"
        return "raises an error before anything is merged"
    off = float((quanto_models.run(model) - before).abs().max() / before.abs().max())
    assert off < 0.05, f"merged, the output is {off:.0%} off"
    return None
