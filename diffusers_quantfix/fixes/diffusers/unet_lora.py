"""Text-to-video and Kandinsky 3 pipelines cannot load a LoRA.

Symptom: AttributeError "'UNet3DConditionModel' object has no attribute 'load_lora_adapter'", or "'Kandinsky3UNet'
    object has ...", from ``load_lora_weights`` of TextToVideoSDPipeline, VideoToVideoSDPipeline, Kandinsky3Pipeline and
    Kandinsky3Img2ImgPipeline, quantized or not. With diffusers 0.31 "'UNet3DConditionModel' object has no attribute
    'unload_lora'" from ``unload_lora_weights``, and the like from ``fuse_lora`` and ``set_adapters``.
Cause: since 0.32.0 a pipeline's loader calls ``load_lora_adapter`` of the UNet, a method of PeftAdapterMixin, and these
    two UNets do not have that base class; the other calls are older. (UNetControlNetXSModel does not have it either.
    Its layers have other names than those of the UNet that a LoRA is for, so that half of a LoRA would be loaded: there
    the error stays.)
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/unets/unet_3d_condition.py; not
    reported.
Patch: the base class, as all other UNets with a loader have it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import Undecided
from ...engine.fix import Fix, Target
from ...engine.probe import resolve
from ...engine.target import finished

FIX = Fix(
    __doc__,
    id="diffusers-unet-lora",
    targets=(
        Target(
            "diffusers-unet3d-lora",
            "diffusers.models.unets.unet_3d_condition",
            {"diffusers": ">=0.31.0,<=0.42.1"},
        ),
        Target(
            "diffusers-kandinsky3-lora",
            "diffusers.models.unets.unet_kandinsky3",
            {"diffusers": ">=0.32.0,<=0.42.1"},
        ),
    ),
    patterns=(
        r"'(UNet3DConditionModel|Kandinsky3UNet)' object has no attribute '((un)?load_lora|load_attn_procs)",
    ),
    frames=("UNet3DConditionModel|Kandinsky3UNet", "TextToVideoSD|VideoToVideoSD|Kandinsky3"),
)

_UNETS = {"unet_3d_condition": "UNet3DConditionModel", "unet_kandinsky3": "Kandinsky3UNet"}
_LOADERS = "diffusers.loaders.peft"


def broken(module: ModuleType) -> bool:
    """Does the UNet lack the methods?

    Raises:
        Undecided: the module of the base class is not imported; until then nothing can be loaded.
    """
    if finished(_LOADERS) is None:
        raise Undecided(_LOADERS)
    unet, base = _unet(module), resolve(sys.modules[_LOADERS], "PeftAdapterMixin")
    if not hasattr(unet, "load_attn_procs"):  # what loads before 0.32.0, of another base class
        resolve(base, "load_lora_adapter")
    resolve(base, "unload_lora")
    return not hasattr(unet, "unload_lora")


def patch(module: ModuleType, draft: Draft) -> None:
    draft.inherit(_unet(module), sys.modules[_LOADERS].PeftAdapterMixin)


def _unet(module: ModuleType) -> Any:
    return resolve(module, _UNETS[module.__name__.rpartition(".")[2]])
