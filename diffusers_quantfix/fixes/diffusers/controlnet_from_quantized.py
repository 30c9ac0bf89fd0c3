"""A ControlNet that is made of a quantized transformer or UNet has wrong weights.

Symptom: no error, but ``from_transformer`` of a Flux, SD3, Qwen-Image or Hunyuan-DiT ControlNet gives layers with the
    bytes of an 8-bit weight for numbers (bitsandbytes, SDNQ, FP8 of Black Forest Labs), or with random numbers where
    optimum-quanto, AutoRound or Nunchaku has quantized the transformer. Of 4 bits, of torchao, or where the embedders
    are quantized too: errors about names and sizes in a state dict.
Cause: the weights are copied with ``load_state_dict(..., strict=False)``, which passes over names that do not fit, and
    writes whatever has the right shape.
Upstream: not reported.
Patch: a ValueError before anything is made. Layers with a LoRA are copied without it, unless it is fused; upstream
    leaves them out, whose names differ. ``from_transformer`` of a Z-Image ControlNet, which shares the layers
    themselves, is left alone. So is every method that copies with ``strict=True`` outside of this package, like
    ``UNetMotionModel.from_unet2d``: PyTorch raises there, since a quantized layer has names that a plain one has not.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...models.copied_weights import guard, unguarded

FIX = Fix(
    id="diffusers-controlnet-from-quantized",
    title="a ControlNet that is made of a quantized transformer has wrong weights",
    module="diffusers.models.controlnets",
    claims={"diffusers": ">=0.32.0,<=0.42.1"},
    upstream=(),
    symptom="noise from a ControlNet after from_transformer() of a quantized transformer",
    harm="wrong result",
    frames=("ControlNetModel", "from_transformer|from_unet"),
    since="0.1.0",
)


def broken(controlnets: ModuleType) -> bool:
    return unguarded(controlnets)


def patch(controlnets: ModuleType, draft: Draft) -> None:
    guard(controlnets, draft)
