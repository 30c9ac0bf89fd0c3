"""A 4-bit Flux transformer with a merged LoRA is saved and loaded."""

from __future__ import annotations

from ..case import CannotReproduce
from ..models.devices import cuda


def case(work: str) -> str | None:
    import os

    import torch

    cuda("diffusers loads 4-bit models on a GPU only")
    from diffusers import FluxTransformer2DModel

    from ..models import four_bit, lora

    where, folder = four_bit.device(), os.path.join(work, "merged")
    pipe = lora.pipeline(transformer=four_bit.flux(work, where))
    # layer names, and shapes that a packed weight does not have, come from a plain model
    weights = lora.weights(lora.pipeline().transformer, "transformer")
    try:
        pipe.load_lora_weights(weights, adapter_name="lora")
    except RuntimeError as error:  # it creates a layer to compare shapes, with the dtype of the packed bytes
        if "can require gradients" not in str(error):
            raise
        raise CannotReproduce("this diffusers loads no LoRA into a 4-bit model") from None
    pipe.fuse_lora()
    merged = four_bit.run_flux(pipe.transformer, where)
    pipe.transformer.save_pretrained(folder)
    # in older releases ``dtype`` of a 4-bit model is that of its packed bytes
    dtype = next(one.dtype for one in pipe.transformer.parameters() if one.is_floating_point())
    again = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=dtype)
    away = [name for name, parameter in again.named_parameters() if parameter.is_meta]
    assert not away, f"base_layer: {len(away)} parameters are not in the checkpoint, and stay on meta"
    assert torch.equal(four_bit.run_flux(again.to(where), where), merged), "the merged LoRA is lost"
    return "the model that is loaded has the merged LoRA"
