"""Kolors image-to-image and PAG cannot load a LoRA, or set its weight.

Symptom: AttributeError: 'KolorsImg2ImgPipeline' object has no attribute 'text_encoder_2'
Cause: these two load LoRAs as SDXL does, whose ``load_lora_weights`` reads ``self.text_encoder_2`` whether the LoRA has
    weights for it or not. By then the UNet has the adapter, and the second attempt says that its name is taken. Before
    diffusers 0.33 the LoRA is loaded, and ``set_adapters`` fails the same way.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/lora_pipeline.py#L654; not
    reported.
Patch: a pipeline without a second text encoder gets None for it, as an SDXL pipeline has that was loaded without one.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-kolors-lora",
    module="diffusers.loaders.lora_pipeline",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "peft": ""},
    harm="error",
    patterns=(r"'Kolors\w*Pipeline' object has no attribute 'text_encoder_2'",),
    frames=("Kolors", "load_lora_weights|set_adapters"),
    since="0.1.0",
)

_LOADER, _MISSING = "StableDiffusionXLLoraLoaderMixin", "text_encoder_2"
_METHODS = ("load_lora_weights", "set_adapters")


def broken(lora_pipeline: ModuleType) -> bool:
    """Load a LoRA without any weights into a pipeline that has one text encoder, and set no adapter."""
    mixin = resolve(lora_pipeline, _LOADER)
    for method in _METHODS:
        resolve(mixin, method)

    def state_dict(*args: Any, return_lora_metadata: bool = False, **kwargs: Any) -> tuple[Any, ...]:
        return ({}, None, None) if return_lora_metadata else ({}, None)

    def load(*args: Any, **kwargs: Any) -> None: ...

    pipeline = type("Pipeline", (mixin,), {})()
    pipeline.unet, pipeline.text_encoder = SimpleNamespace(config=None), None
    pipeline.lora_state_dict = state_dict
    pipeline.load_lora_into_unet = pipeline.load_lora_into_text_encoder = load
    try:
        pipeline.load_lora_weights("")
        pipeline.set_adapters([], [])
    except AttributeError as error:
        return error.name == _MISSING
    return False


def patch(lora_pipeline: ModuleType, draft: Draft) -> None:
    def make(original):
        def with_all_encoders(self, *args, **kwargs):
            if not hasattr(self, _MISSING):
                setattr(self, _MISSING, None)
            return original(self, *args, **kwargs)

        return with_all_encoders

    for method in _METHODS:
        draft.wrap_plain(resolve(lora_pipeline, _LOADER), method, make)
