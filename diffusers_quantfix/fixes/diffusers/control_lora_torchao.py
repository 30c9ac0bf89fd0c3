"""A Control LoRA cannot be loaded into a Flux quantized by torchao.

Symptom: AttributeError "'Tensor' object has no attribute 'tensor_data_names'" from ``load_lora_weights`` of a Control
    LoRA into a Flux with torchao weights. With torchao 0.15 ValueError "Not supported args for copy_ due to metadata
    mismatch".
Cause: the layer that the LoRA widens is copied into a plain one. ``_maybe_dequantize_weight_for_expanded_lora``
    dequantizes only bitsandbytes and GGUF weights.
Upstream: https://github.com/huggingface/diffusers/issues/10588 and
    https://github.com/huggingface/diffusers/pull/11655 are about bitsandbytes; not reported for torchao.
Patch: it dequantizes these weights too. ``diffusers-control-lora-reset`` puts the quantized layer back afterwards.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.wrappers import is_wrapper

FIX = Fix(
    __doc__,
    id="diffusers-control-lora-torchao",
    module="diffusers.loaders.lora_pipeline",
    claims={"diffusers": ">=0.36.0,<=0.42.1", "torchao": "", "peft": ""},
    patterns=(
        "'Tensor' object has no attribute 'tensor_data_names'",
        "Not supported args for copy_ due to metadata mismatch",
    ),
    frames=("_maybe_expand_transformer_param_shape_or_error_", "load_lora_weights", "torchao"),
)
_NAME = "_maybe_dequantize_weight_for_expanded_lora"


def broken(lora_pipeline: ModuleType) -> bool:
    """Let it dequantize a weight that looks like torchao's."""
    import torch

    dequantize = resolve(lora_pipeline, _NAME)
    plain = torch.zeros(1, device="meta")

    class Weight:
        __module__ = "torchao.a_probe"
        device = plain.device
        dtype = plain.dtype

        def dequantize(self) -> torch.Tensor:
            return plain

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return [], None

    Weight.data = weight = Weight()  # type: ignore[attr-defined]
    layer = type("Layer", (), {"weight": weight})
    try:
        return dequantize(layer, layer) is weight
    except AttributeError:  # diffusers 0.36 first asks torch for an accelerator, whatever the weight is
        return True


def patch(lora_pipeline: ModuleType, draft: Draft) -> None:
    def make(original):
        def dequantize(model, module):
            weight = module.weight.data
            return weight.dequantize() if is_wrapper(weight) else original(model, module)

        return dequantize

    draft.wrap_plain(lora_pipeline, _NAME, make)
