"""A UniLora on a 4-bit bitsandbytes layer: its delta must equal that on a plain layer."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    import torch.distributed.tensor  # peft assumes that it is imported
    from bitsandbytes.nn import Linear4bit
    from peft import UniLoraConfig, get_peft_model

    def product(layer: torch.nn.Module) -> torch.Tensor:
        torch.manual_seed(0)
        config = UniLoraConfig(r=4, target_modules=["0"], init_weights=False)
        model = get_peft_model(torch.nn.Sequential(layer).requires_grad_(False), config)
        delta: torch.Tensor = model.base_model.model[0].get_delta_weight("default").detach().float().cpu()
        return delta

    # Filled as by a checkpoint, so that no kernel is needed.
    packed = Linear4bit(64, 64, bias=False)
    packed.weight.data = torch.zeros(64 * 64 // 2, 1, dtype=torch.uint8)
    expected, found = product(torch.nn.Linear(64, 64, bias=False)), product(packed)
    off = float((found - expected).norm() / expected.norm())
    assert off < 1e-5, f"the product of its factors is {off:.0%} off"
    return "the product of its factors is that on a plain layer"
