"""The LoRA of a 4-bit Flux transformer is saved, in its own dtype and in float32."""

from __future__ import annotations

from ..case import CannotReproduce
from ..models.devices import cuda


def case(work: str) -> str | None:
    import os

    import torch

    cuda("diffusers loads 4-bit models on a GPU only")
    from safetensors.torch import load_file

    from ..models import four_bit, lora

    where, folder = four_bit.device(), os.path.join(work, "lora")
    pipe = lora.pipeline(transformer=four_bit.flux(work, where))
    weights = lora.weights(lora.pipeline().transformer, "transformer")
    try:
        pipe.load_lora_weights(weights, adapter_name="lora")
    except RuntimeError as error:
        if "can require gradients" not in str(error):
            raise
        raise CannotReproduce("this diffusers loads no LoRA into a 4-bit model") from None
    for upcast in (False, True):
        pipe.transformer.save_lora_adapter(folder, adapter_name="lora", upcast_before_saving=upcast)
        saved = load_file(os.path.join(folder, "pytorch_lora_weights.safetensors"))
        assert len(saved) == len(weights), f"{len(saved)} of {len(weights)} tensors are saved"
        assert not upcast or {tensor.dtype for tensor in saved.values()} == {torch.float32}
    return f"{len(weights)} tensors are saved"
