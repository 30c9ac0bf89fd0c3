"""load_lora_weights fails if quanto has quantized the Flux transformer.

Symptom: ``KeyError: 'single_transformer_blocks.0.attn.to_k.weight'`` in ``load_lora_weights``.
Cause: ``FluxLoraLoaderMixin._maybe_expand_lora_state_dict`` looks up the weights in ``transformer.state_dict()``, which
    for a quanto layer holds ``weight._data`` and ``weight._scale`` but no ``weight``. It only needs their shapes.
Upstream: https://github.com/huggingface/diffusers/issues/10512 (open) and
    https://github.com/huggingface/diffusers/issues/10550.
Patch: the method receives a view of the transformer whose ``state_dict()`` also has every parameter under its own name.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...surroundings import on_meta

_METHOD = "_maybe_expand_lora_state_dict"

FIX = Fix(
    __doc__,
    id="diffusers-quanto-lora",
    module="diffusers.loaders.lora_pipeline",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "optimum-quanto": "", "peft": ""},
    patterns=(r"KeyError: '[\w.]*transformer_blocks[\w.]*\.weight'",),
    frames=(
        "load_lora_weights",
        "_maybe_expand_lora_state_dict",
        "_maybe_expand_transformer_param_shape_or_error_",
        "quanto",
    ),
)


def broken(lora_pipeline: ModuleType) -> bool:
    """Call the method with a layer that saves its weight under another name, as quanto's layers do."""
    import torch

    expand = getattr(resolve(lora_pipeline, "FluxLoraLoaderMixin"), _METHOD)
    with on_meta():
        model = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 2, bias=False)})
        lora = {"transformer.layer.lora_A.weight": torch.empty(1, 2)}
    model.state_dict = lambda: {"layer.weight._data": model["layer"].weight}
    try:
        expand(transformer=model, lora_state_dict=lora)
    except KeyError:
        return True
    return False


def patch(lora_pipeline: ModuleType, draft: Draft) -> None:
    """Wrap the method; it runs once per LoRA."""

    def make(original):
        def _maybe_expand_lora_state_dict(cls, transformer, *args, **kwargs):
            return original(cls, _View(transformer), *args, **kwargs)

        return _maybe_expand_lora_state_dict

    draft.wrap_plain(resolve(lora_pipeline, "FluxLoraLoaderMixin"), _METHOD, make)


class _View:
    """A view of a model that differs only in ``state_dict()``."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def state_dict(self) -> Any:
        """The model's own state dict, plus the parameters missing from it."""
        found = self._model.state_dict()
        for name, parameter in self._model.named_parameters():
            found.setdefault(name, parameter)
        return found
