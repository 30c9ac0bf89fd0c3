"""A LoRA is merged into a 4-bit weight of bitsandbytes, and taken out again."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from peft import LoraConfig, get_peft_model

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(four_bit.linear(torch.nn.Linear(128, 128), where))
    layers.is_loaded_in_4bit = True
    model = get_peft_model(layers, LoraConfig(r=8, target_modules=["0"], init_lora_weights=False)).eval()
    layer = model.base_model.model[0]
    with torch.no_grad():
        for weights in (layer.lora_A, layer.lora_B):
            weights["default"].weight.mul_(0.1)

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
