"""A VeRA is merged into a 4-bit weight of bitsandbytes, and taken out again."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from peft import VeraConfig, get_peft_model

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(four_bit.linear(torch.nn.Linear(128, 128), where))
    layers.is_loaded_in_4bit = True
    config = VeraConfig(r=8, target_modules=["0"], d_initial=1.0, init_weights=False)
    model = get_peft_model(layers, config).eval()
    layer = model.base_model.model[0]

    def weight() -> Any:
        base = layer.get_base_layer().weight
        return dequantize_4bit(base.data, base.quant_state).float().cpu()

    # Without a run: what some CPUs need for it is another defect.
    before = weight()
    model.merge_adapter()
    assert not torch.equal(weight(), before), "merging has no effect"
    model.unmerge_adapter()
    off = float((weight() - before).norm() / before.norm())
    assert off == 0, f"the weight is off by {off:.2g} after unmerging"
    return "the weight from before, bit by bit"
