"""A DEFT without effect is added to an 8-bit layer: the output must not change."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    import torch.distributed.tensor  # peft assumes that it is imported
    from bitsandbytes.nn import Int8Params, Linear8bitLt
    from peft import DeftConfig, get_peft_model

    torch.manual_seed(0)
    scales = torch.rand(16)
    weight = Int8Params(
        torch.randint(-127, 128, (16, 16), dtype=torch.int8), requires_grad=False, has_fp16_weights=False
    )
    # Filled as by a checkpoint, so that no kernel is needed.
    weight.CB, weight.SCB = weight.data, scales
    model = torch.nn.Sequential(Linear8bitLt(16, 16, bias=False, has_fp16_weights=False))
    model[0].weight = weight
    layer = get_peft_model(model, DeftConfig(r=2, target_modules=["0"])).base_model.model[0]
    plain = weight.data * scales[:, None] / 127
    _, right = layer._project(layer.deft_P["default"].detach(), "default")
    expected, found = right.t() @ plain, layer.deft_R["default"].detach() * layer.deft_scaling["default"]
    off = float((found - expected).norm() / expected.norm())
    assert off < 1e-2, f"R is {off:.0f} times off, and with it the output"
    return "R is that with which the adapter changes nothing"
