"""A LoRA for a quantized text encoder cannot be loaded.

Symptom: ValueError "You cannot cast a bitsandbytes model in a new `dtype`", or from older releases "`.to` is not
    supported for `4-bit` or `8-bit` bitsandbytes models", from ``load_lora_weights`` with keys for a text encoder. The
    pipeline's hooks, removed before, are lost.
Cause: ``_load_lora_into_text_encoder`` ends with ``text_encoder.to(device=text_encoder.device,
    dtype=text_encoder.dtype)``. That only moves the new layers, but is refused as a cast.
Upstream: https://github.com/huggingface/diffusers/issues/11570, closed; the line has not changed.
Patch: while a LoRA is loaded into a quantized text encoder, ``.to`` with the encoder's own dtype moves only the new
    layers.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.new_layers import moves_new_layers_only
from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve

FIX = Fix(
    __doc__,
    id="diffusers-text-encoder-lora-quantized",
    module="diffusers.loaders.lora_pipeline",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "transformers": "", "peft": ""},
    patterns=(
        "cannot cast a bitsandbytes model in a new( dtype|[.])",
        r"\.to is not supported for 4-bit or 8-bit",
    ),
    frames=("load_lora_weights", "load_lora_into_text_encoder", "lora_base.py"),
    asked_once=True,
)

_METHOD = "load_lora_into_text_encoder"


def broken(lora_pipeline: ModuleType) -> bool:
    """Does it pass a device and a dtype to ``.to``?"""
    mixins = _mixins(lora_pipeline)
    from diffusers.loaders import lora_base

    if hasattr(lora_base, "_load_lora_into_text_encoder"):  # from 0.33.0 on
        loaders = [lora_base._load_lora_into_text_encoder]
    else:
        loaders = [vars(mixin)[_METHOD] for mixin in mixins]
    return any(("device", "dtype") in function_of(loader).__code__.co_consts for loader in loaders)


def patch(lora_pipeline: ModuleType, draft: Draft) -> None:
    def make(original):
        def load_lora_into_text_encoder(cls, state_dict, network_alphas, text_encoder, *args, **kwargs):
            with moves_new_layers_only(text_encoder):
                return original(cls, state_dict, network_alphas, text_encoder, *args, **kwargs)

        return load_lora_into_text_encoder

    for mixin in _mixins(lora_pipeline):
        draft.wrap_plain(mixin, _METHOD, make)


def _mixins(lora_pipeline: ModuleType) -> list[type]:
    """The classes that load a LoRA into a text encoder, each with its own method."""
    resolve(lora_pipeline, f"StableDiffusionLoraLoaderMixin.{_METHOD}")
    mixins = {
        value
        for value in vars(lora_pipeline).values()
        if isinstance(value, type) and isinstance(vars(value).get(_METHOD), classmethod)
    }
    if not mixins:
        raise TargetMissing(f"{lora_pipeline.__name__} has no {_METHOD}")
    return sorted(mixins, key=lambda mixin: mixin.__name__)
