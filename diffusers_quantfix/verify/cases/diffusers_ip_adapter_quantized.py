"""An IP-Adapter is loaded into a 4-bit UNet."""

from __future__ import annotations

from ..models.devices import cuda
from ..models.ip_adapter import of_unet
from ..models.unet import unet


def case(work: str) -> str | None:
    import torch

    cuda("this diffusers quantizes on a GPU only")
    from diffusers import BitsAndBytesConfig, UNet2DConditionModel

    unet().save_pretrained(work)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = UNet2DConditionModel.from_pretrained(work, quantization_config=config, torch_dtype=torch.float16)
    model._load_ip_adapter_weights([of_unet(model)])
    new = [
        parameter for name, parameter in model.named_parameters() if "_ip." in name or "encoder_hid" in name
    ]
    wrong = [tensor for tensor in new if tensor.dtype != torch.float16 or tensor.device != model.device]
    assert new, "the adapter has no layers"
    assert not wrong, f"{len(wrong)} of {len(new)} new weights are in another dtype, or on another device"
    return f"all {len(new)} new weights are in float16 on {model.device}"
