"""A ControlNet made from a quantized transformer has wrong weights.

Symptom: no error, but ``from_transformer`` of a Flux, SD3, Qwen-Image or Hunyuan-DiT ControlNet, and ``from_unet`` of a
    sparse one, give layers that hold the bytes of an 8-bit weight as numbers (bitsandbytes, SDNQ, FP8 of Black Forest
    Labs), or random numbers if the transformer was quantized by optimum-quanto, AutoRound or Nunchaku. In 4-bit, with
    torchao, or if the embedders are quantized too: errors about names and sizes in a state dict.
Cause: the weights are copied with ``load_state_dict(..., strict=False)``, which skips names that do not fit, and copies
    whatever has the right shape.
Upstream: https://github.com/huggingface/diffusers/blob/v0.31.0/src/diffusers/models/controlnet_flux.py#L208,
    https://github.com/huggingface/diffusers/blob/v0.31.0/src/diffusers/models/controlnet_hunyuan.py#L212,
    https://github.com/huggingface/diffusers/blob/v0.31.0/src/diffusers/models/controlnet_sparsectrl.py#L443; not
    reported. In diffusers 0.31 each class has its own module; from 0.32 on they are in one package.
Patch: a ValueError before anything is made. Layers with a LoRA are copied without it, unless it is fused; upstream
    skips them, because their names differ. ``from_transformer`` of a Z-Image ControlNet, which shares the layers
    themselves, is left alone. So is every method outside that package that copies with ``strict=True``, like
    ``UNetMotionModel.from_unet2d``: PyTorch raises there, since a quantized layer has names that a plain one does not.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...models.copied_weights import conversions, guard

_ONLY_0_31 = {"diffusers": ">=0.31.0,<0.32.0"}

FIX = Fix(
    __doc__,
    id="diffusers-controlnets-from-quantized",
    targets=(
        Target(
            "diffusers-controlnet-from-quantized",
            "diffusers.models.controlnets",
            {"diffusers": ">=0.32.0,<=0.42.1"},
        ),
        Target("diffusers-controlnet-flux-from-quantized", "diffusers.models.controlnet_flux", _ONLY_0_31),
        Target(
            "diffusers-controlnet-hunyuan-from-quantized", "diffusers.models.controlnet_hunyuan", _ONLY_0_31
        ),
        Target(
            "diffusers-controlnet-sparse-from-quantized", "diffusers.models.controlnet_sparsectrl", _ONLY_0_31
        ),
    ),
    harm="wrong result",
    frames=(
        "(Flux|SD3|QwenImage|HunyuanDiT2D|Sparse)?ControlNetModel",
        "from_transformer|from_unet",
    ),
    asked_once=True,
)


def broken(module: ModuleType) -> bool:
    """Has it a method that copies weights? None of them checks whether they are quantized."""
    return bool(conversions(module))


def patch(module: ModuleType, draft: Draft) -> None:
    guard(module, draft)
