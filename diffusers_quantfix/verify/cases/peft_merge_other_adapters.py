"""An HRA is merged into quanto weights: it must have an effect, or an error must be raised."""

from __future__ import annotations

from ..case import CannotReproduce


def case(work: str) -> str | None:
    from importlib.util import find_spec

    import torch
    from peft import HRAConfig, get_peft_model

    from ..models import quanto_models

    if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
        raise CannotReproduce("needs optimum-quanto, which is not installed")
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
