"""An IP-Adapter is loaded into a 4-bit UNet."""

from __future__ import annotations

from ..case import NeedsDevice


def case(work: str) -> str | None:
    import torch

    if not torch.cuda.is_available():
        raise NeedsDevice("needs a CUDA device: this diffusers quantizes on a GPU only")
    from diffusers import BitsAndBytesConfig, UNet2DConditionModel

    torch.manual_seed(0)
    UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=2,
        cross_attention_dim=64,
    ).save_pretrained(work)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    unet = UNet2DConditionModel.from_pretrained(work, quantization_config=config, torch_dtype=torch.float16)
    names = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    numbers = [number for number, name in enumerate(unet.attn_processors) if name in names]
    adapter = {f"{number}.to_{part}_ip.weight": torch.randn(128, 64) for number in numbers for part in "kv"}
    projection = {
        "proj.weight": torch.randn(256, 32),
        "proj.bias": torch.zeros(256),
        "norm.weight": torch.ones(64),
        "norm.bias": torch.zeros(64),
    }
    unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": adapter}])
    new = [
        parameter for name, parameter in unet.named_parameters() if "_ip." in name or "encoder_hid" in name
    ]
    wrong = [tensor for tensor in new if tensor.dtype != torch.float16 or tensor.device != unet.device]
    assert new, "the adapter has no layers"
    assert not wrong, f"{len(wrong)} of {len(new)} new weights are in another dtype, or on another device"
    return f"all {len(new)} new weights are in float16 on {unet.device}"
