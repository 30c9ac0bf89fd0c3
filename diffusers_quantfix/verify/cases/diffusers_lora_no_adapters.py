"""A LoRA for ControlNet-XS is refused with a sentence."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import control_xs, lora

    pipe = control_xs.pipeline(control_xs.unet())
    weights = lora.weights(pipe.unet, "unet")
    try:
        pipe.load_lora_weights(weights, adapter_name="one")
    except ValueError as error:
        return str(error).partition(".")[0]
    raise AssertionError("a LoRA was loaded into a model without adapters")
