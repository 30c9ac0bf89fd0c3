"""A LoRA is loaded into Kolors image-to-image."""

from __future__ import annotations

from ..models import lora, unet


def case(work: str) -> str | None:
    from diffusers import EulerDiscreteScheduler, KolorsImg2ImgPipeline

    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    pipeline = KolorsImg2ImgPipeline(unet=unet.unet(), scheduler=EulerDiscreteScheduler(), **parts)
    weights = lora.weights(pipeline.unet, "unet")
    pipeline.load_lora_weights(weights, adapter_name="one")
    pipeline.set_adapters("one", 0.5)
    found = sum("lora" in key for key, _ in pipeline.unet.named_parameters())
    assert found == len(weights), f"loaded {found} LoRA tensors instead of {len(weights)}"
    return f"loaded all {found} tensors of the LoRA"
