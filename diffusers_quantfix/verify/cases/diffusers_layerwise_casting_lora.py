"""Layerwise casting of layers in bfloat16 with a LoRA in float32."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers.hooks import apply_layerwise_casting
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    config = LoraConfig(r=4, target_modules=["0", "1"], init_lora_weights=False)
    model = get_peft_model(layers, config, autocast_adapter_dtype=False).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    given = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(given)
        apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16, ("lora_A", "lora_B"))
        try:
            off = (model(given) - expected).abs().max() / expected.abs().max()
        except RuntimeError as error:
            raise AssertionError(f"the model does not run: {error}") from None
    assert off < 0.1, f"relative error: {off:.2g}"
    return f"the model runs; relative error {off:.2g}, from float8"
