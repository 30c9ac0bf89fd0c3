"""A LoRA is merged into a 4-bit weight of bitsandbytes, and taken out again."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from peft import LoraConfig, get_peft_model

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(four_bit.linear(torch.nn.Linear(128, 128), where))
    layers.is_loaded_in_4bit = True
    model = get_peft_model(layers, LoraConfig(r=8, target_modules=["0"], init_lora_weights=False)).eval()
    given = torch.randn(3, 128).to(where)
    with torch.no_grad():
        before = model(given)
        model.merge_adapter()
        assert not torch.equal(model(given), before), "merging has no effect"
        model.unmerge_adapter()
        off = float((model(given) - before).abs().max() / before.abs().max())
    assert off == 0, f"after unmerging the output is off by {off:.2g} of its greatest value"
    return "the weight from before, bit by bit"
