"""A pipeline whose model takes no LoRA does not say so.

Symptom: AttributeError "'UNetControlNetXSModel' object has no attribute 'load_lora_adapter'", or "'PRXPipeline' object
    has no attribute 'unet'", from ``load_lora_weights``, quantized or not.
Cause: these pipelines have the loader of Stable Diffusion's LoRAs, and not its UNet: ControlNet-XS a model with two
    networks in one, PRX a transformer. Neither model has adapters.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/lora_pipeline.py#L219; not
    reported.
Patch: ValueError with the next step. Nothing was changed by then.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-lora-no-adapters",
    module="diffusers.loaders.lora_pipeline",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "peft": ""},
    harm="error",
    patterns=(
        r"'UNetControlNetXSModel' object has no attribute 'load_(lora_adapter|attn_procs)'",
        r"'PRXPipeline' object has no attribute 'unet'",
    ),
    frames=("load_lora_weights", "UNetControlNetXSModel|PRXPipeline"),
    since="0.1.0",
)

_LOADERS = ("StableDiffusionLoraLoaderMixin", "StableDiffusionXLLoraLoaderMixin")
_METHOD = "load_lora_weights"
_LOADS = ("load_lora_adapter", "load_attn_procs")  # the second one before diffusers 0.32


def broken(lora_pipeline: ModuleType) -> bool:
    """Load a LoRA into a pipeline with a model that has no adapters."""
    mixin = resolve(lora_pipeline, _LOADERS[0])
    for name in _LOADERS:
        resolve(lora_pipeline, f"{name}.{_METHOD}")

    def state_dict(*args: Any, return_lora_metadata: bool = False, **kwargs: Any) -> tuple[Any, ...]:
        return ({}, None, None) if return_lora_metadata else ({}, None)

    pipeline = type("Pipeline", (mixin,), {})()
    pipeline.unet, pipeline.text_encoder = object(), None
    pipeline.lora_state_dict = state_dict
    pipeline.load_lora_into_unet = lambda *args, unet, **kwargs: unet.load_lora_adapter
    try:
        pipeline.load_lora_weights("")
    except AttributeError:
        return True
    except ValueError:
        return False
    return False


def patch(lora_pipeline: ModuleType, draft: Draft) -> None:
    def make(upstream: Any) -> Any:
        def load_lora_weights(self, *args, **kwargs):
            try:
                return upstream(self, *args, **kwargs)
            except AttributeError as error:
                sentence = _refusal(self, error)
                if not sentence:
                    raise
                raise ValueError(sentence) from error

        return load_lora_weights

    for name in _LOADERS:
        draft.wrap_plain(resolve(lora_pipeline, name), _METHOD, make)


def _refusal(pipeline: Any, error: AttributeError) -> str:
    """What to say where this error means that there is no model for a LoRA, else ""."""
    name, kind = pipeline.unet_name, type(pipeline).__name__
    if error.obj is pipeline and error.name == name:
        return (
            f"{kind} cannot load a LoRA: the LoRA is for a {name}, which this pipeline does not have, and diffusers "
            "loads none into the model that it has. Use a checkpoint that the LoRA was merged into."
        )
    model = getattr(pipeline, name, None)
    if model is not None and error.obj is model and error.name in _LOADS:
        return (
            f"{kind} cannot load a LoRA: its {name} is a {type(model).__name__}, which takes none. Load the LoRA into "
            f"a pipeline with a plain UNet, call fuse_lora() there, and make this {name} from that UNet."
        )
    return ""
