"""quanto quantizes the layers inside modules that should not be converted.

Symptom: with ``QuantoConfig(modules_to_not_convert=["transformer_blocks"])`` every layer is silently quantized; the
    same for the path of one layer. Modules that a model keeps in float32 are quantized too, and some then fail on
    another dtype.
Cause: ``_replace_with_quanto_layers`` compares only the last part of a name, while bitsandbytes and torchao also
    compare the parent modules.
Upstream: not reported.
Patch: a layer that is named, or inside a named module, stays plain. A saved checkpoint is loaded as it is: a layer is
    quantized if its weight is. Without the fix, the plain layers of such a checkpoint stay on meta, and the first run
    raises RuntimeError "... not on the expected device meta".
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="diffusers-quanto-kept-modules",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "optimum-quanto": ""},
    harm="wrong result",
    since="0.1.0",
    frames=("modules_to_not_convert", "quanto"),
    asked_once=True,
)

_REPLACE, _LOAD = "_replace_with_quanto_layers", "_load_pretrained_model"


def broken(modeling_utils: ModuleType) -> bool:
    """Does it never join a path?  Calling it would import quanto."""
    replace = resolve(_utils(), _REPLACE)
    return "join" not in names_used(replace)


def _utils() -> Any:
    import importlib

    return importlib.import_module("diffusers.quantizers.quanto.utils")


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    def make_replace(original):
        def _replace_with_quanto_layers(
            model, quantization_config, modules_to_not_convert, pre_quantized=False, **kwargs
        ):
            kept = {} if pre_quantized else _named_layers(model, modules_to_not_convert)
            result = original(
                model, quantization_config, modules_to_not_convert, pre_quantized=pre_quantized, **kwargs
            )
            for name, layer in kept.items():
                _put(model, name, layer)
            return result

        return _replace_with_quanto_layers

    def make_load(original):
        def _load_pretrained_model(cls, model, state_dict, files, path, loaded_keys, *args, **kwargs):
            quantizer = kwargs.get("hf_quantizer")
            if quantizer is not None and quantizer.pre_quantized and _is_quanto(quantizer):
                _plain_where_saved_plain(model, frozenset(loaded_keys))
            return original(cls, model, state_dict, files, path, loaded_keys, *args, **kwargs)

        return _load_pretrained_model

    draft.wrap_plain(_utils(), _REPLACE, make_replace)
    draft.wrap_plain(resolve(modeling_utils, "ModelMixin"), _LOAD, make_load)


def _is_quanto(quantizer: Any) -> bool:
    from ...weights.method import method_of

    return method_of(quantizer.quantization_config) == "quanto"


def _named_layers(model: Any, names: list[str]) -> dict[str, Any]:
    """The linear layers that are named, or inside a named module: path -> layer."""
    import torch

    return {
        path: layer
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, torch.nn.Linear) and any(f".{name}." in f".{path}." for name in names)
    }


def _plain_where_saved_plain(model: Any, keys: frozenset[str]) -> None:
    """Replace, on meta, the quantized layers whose weights are unquantized in the checkpoint."""
    import torch
    from optimum.quanto import QLinear

    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, QLinear) and f"{name}.weight" in keys:
            plain = torch.nn.Linear(
                layer.in_features, layer.out_features, layer.bias is not None, "meta", layer.weight.dtype
            )
            _put(model, name, plain)


def _put(model: Any, name: str, layer: Any) -> None:
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent)._modules[child] = layer
