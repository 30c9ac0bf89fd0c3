"""An HRA without effect is added to an 8-bit layer: the output must not change, or an error must be raised."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Int8Params, Linear8bitLt
    from peft import HRAConfig, get_peft_model

    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear8bitLt(16, 16, bias=False, has_fp16_weights=False))
    # Filled as by a checkpoint, so that no kernel is needed.
    model[0].weight = Int8Params(
        torch.randint(-127, 128, (16, 16), dtype=torch.int8), requires_grad=False, has_fp16_weights=False
    )
    try:
        adapted = get_peft_model(model, HRAConfig(r=2, target_modules=["0"])).eval()
    except ValueError as refusal:
        assert "an 8-bit layer" in str(refusal), str(refusal)
        assert type(model[0]) is Linear8bitLt, "something was added"
        return "raises an error before anything is added"
    with torch.no_grad():
        largest = float(adapted(torch.ones(1, 16)).abs().max())
    assert largest < 64, f"the output is {largest:.0f}, of 8-bit numbers without their scales"
    return None
