"""An IP-Adapter is loaded into a 4-bit UNet."""

from __future__ import annotations

from ..models.devices import cuda
from ..models.unet import unet


def case(work: str) -> str | None:
    import torch

    cuda("this diffusers quantizes on a GPU only")
    from diffusers import BitsAndBytesConfig, UNet2DConditionModel

    unet().save_pretrained(work)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = UNet2DConditionModel.from_pretrained(work, quantization_config=config, torch_dtype=torch.float16)
    names = [name for name in model.attn_processors if name.endswith("attn2.processor")]
    numbers = [number for number, name in enumerate(model.attn_processors) if name in names]
    adapter = {f"{number}.to_{part}_ip.weight": torch.randn(128, 64) for number in numbers for part in "kv"}
    projection = {
        "proj.weight": torch.randn(256, 32),
        "proj.bias": torch.zeros(256),
        "norm.weight": torch.ones(64),
        "norm.bias": torch.zeros(64),
    }
    model._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": adapter}])
    new = [
        parameter for name, parameter in model.named_parameters() if "_ip." in name or "encoder_hid" in name
    ]
    wrong = [tensor for tensor in new if tensor.dtype != torch.float16 or tensor.device != model.device]
    assert new, "the adapter has no layers"
    assert not wrong, f"{len(wrong)} of {len(new)} new weights are in another dtype, or on another device"
    return f"all {len(new)} new weights are in float16 on {model.device}"
