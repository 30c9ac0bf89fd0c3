"""A LoRA is compared with packed weights when it is loaded into a 4-bit or GGUF Flux.

Symptom: ``load_lora_weights`` of an ordinary LoRA raises RuntimeError "Only Tensors of floating point and complex dtype
    can require gradients" for a 4-bit Flux, and "size mismatch for ... lora_A" for one from a GGUF file. If the Flux
    has more input channels than the LoRA (Fill, Depth, Canny): "output with shape [4, 1] doesn't match the broadcast
    shape [4, 64]" and "size mismatch for x_embedder.lora_A".
Cause: ``_maybe_expand_transformer_param_shape_or_error_`` and ``_maybe_expand_lora_state_dict`` of
    ``FluxLoraLoaderMixin`` use the shape of the packed bytes as the layer's shape. diffusers 0.32.2 corrected the
    comparisons for bitsandbytes, 0.33.0 for GGUF; a LoRA with fewer input channels is still padded to the packed shape.
Upstream: https://github.com/huggingface/diffusers/issues/10512, https://github.com/huggingface/diffusers/issues/10612
    and https://github.com/huggingface/diffusers/pull/10578; the padding is not reported.
Patch: layers with packed weights are compared here, by their numbers of features; upstream sees those that are too
    small for the LoRA, and all others. A LoRA with fewer input channels is padded with zeros to the layer's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...adapters.flux_lora import EXPAND, Touched, expanding, touched
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

_PAD = "_maybe_expand_lora_state_dict"

FIX = Fix(
    __doc__,
    id="diffusers-flux-lora-packed",
    module="diffusers.loaders.lora_pipeline",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "peft": ""},
    patterns=(
        "Only Tensors of floating point and complex dtype can require gradients",
        r"size mismatch for [\w.]*(transformer_blocks|x_embedder)[\w.]*lora_A[\w.]*: copying a param with shape",
        r"output with shape \[\d+, 1\] doesn't match the broadcast shape",
    ),
    frames=("load_lora_weights", "_maybe_expand_lora_state_dict", "flux", r"4.?bits?\b|nf4|gguf"),
)


def broken(lora_pipeline: ModuleType) -> bool:
    """Pad a LoRA for a layer of 4 features whose packed weight has 8 columns."""
    import torch

    pad = getattr(resolve(lora_pipeline, "FluxLoraLoaderMixin"), _PAD)

    class GGUFParameter(torch.nn.Parameter):
        quant_shape = torch.Size((1, 4))

    layer = torch.nn.Linear(4, 1, bias=False, device="meta")
    layer.weight = GGUFParameter(torch.empty(1, 8, device="meta"), requires_grad=False)
    key = "transformer.layer.lora_A.weight"
    padded = pad(
        transformer=torch.nn.ModuleDict({"layer": layer}),
        lora_state_dict={key: torch.empty(1, 2, device="meta")},
    )
    return bool(padded[key].shape[1] != 4)


def patch(lora_pipeline: ModuleType, draft: Draft) -> None:
    """Wrap both methods; they run once per LoRA."""
    mixin = resolve(lora_pipeline, "FluxLoraLoaderMixin")
    draft.wrap_plain(mixin, EXPAND, expanding(_what_is_too_small))
    draft.wrap_plain(mixin, _PAD, _padding)


@contextlib.contextmanager
def _what_is_too_small(transformer: Any, lora: dict[str, Any], prefix: str) -> Iterator[dict[str, Any]]:
    """The LoRA without packed layers that are large enough: upstream passes over a layer that it has no weights for."""
    passed = {one.key for one in touched(transformer, lora, prefix) if _is_packed(one) and not one.too_small}
    yield {key: value for key, value in lora.items() if key not in passed}


def _padding(original: Any) -> Any:
    def pad(cls: Any, transformer: Any, lora_state_dict: Any, **kwargs: Any) -> Any:
        import torch

        ours = {
            one.key: torch.nn.functional.pad(one.down, (0, one.layer.in_features - one.down.shape[1]))
            for one in touched(transformer, lora_state_dict, cls.transformer_name)
            if _is_packed(one) and not one.too_small
        }
        rest = {key: value for key, value in lora_state_dict.items() if key not in ours}
        result = {**original(cls, transformer, rest, **kwargs), **ours}
        return {key: result[key] for key in (*lora_state_dict, *(result.keys() - lora_state_dict.keys()))}

    return pad


def _is_packed(one: Touched) -> bool:
    return tuple(one.layer.weight.shape) != (one.layer.out_features, one.layer.in_features)
