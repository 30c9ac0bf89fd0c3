"""diffusers loads a damaged checkpoint of quanto weights without an error.

Symptom: a saved model with quanto weights whose ``weight._scale`` or ``weight._shift`` has the wrong shape, or whose
    ``weight._shift`` is missing, gives wrong output; without ``weight._scale`` or ``weight._data`` it cannot run.
    ``from_pretrained`` reports nothing.
Cause: for the parts of a weight diffusers leaves the shape check to its quantizer, and ``QuantoQuantizer`` has none;
    its ``update_missing_keys`` drops the names of all missing parts, whose tensors stay on meta.
Upstream: not reported; diffusers drops quanto with 1.0.
Patch: both raise ValueError with the tensor's name, before or during loading. A scale with one number per row, in
    whatever shape, is used as the row scale; one for the last axis is left alone. So is a layer whose weight is missing
    from the checkpoint: it stays on meta, so that the user may replace it, and is named in the warning about missing
    keys, as a plain layer is; until then its forward pass raises RuntimeError.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-quanto-parts",
    module="diffusers.quantizers.quanto.quanto_quantizer",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(
        r"the checkpoint has no \S*weight\._(scale|shift|data)",
        r"weight\._(scale|shift|data)\S* has the shape",
    ),
    since="0.1.0",
    harm="wrong result",
    frames=("from_pretrained", "quanto_quantizer"),
)

_PARTS = ("_data", "_scale", "_shift", "_data._data")


def broken(quanto_quantizer: ModuleType) -> bool:
    """Is a part of the wrong shape accepted?"""
    import torch

    quantizer_class = resolve(quanto_quantizer, "QuantoQuantizer")
    quantizer = quantizer_class.__new__(quantizer_class)
    try:
        quantizer.check_quantized_param_shape("weight._scale", torch.empty(2, 1), torch.empty(3, 2))
    except ValueError:
        return False
    return True


def patch(quanto_quantizer: ModuleType, draft: Draft) -> None:
    def make_shape(original):
        def check_quantized_param_shape(self, *args, **kwargs):
            _compare(*args, **kwargs)
            return original(self, *args, **kwargs)

        return check_quantized_param_shape

    def make_missing(original):
        def update_missing_keys(self, model, missing_keys, *args, **kwargs):
            found = original(self, model, missing_keys, *args, **kwargs)
            if not self.pre_quantized:
                return found
            missing = {key for key in missing_keys if _is_part(model, key)}
            torn = _torn(model, missing)
            if torn:
                raise ValueError(
                    f"the checkpoint has no {', '.join(sorted(torn)[:8])}"
                    f"{f' and {len(torn) - 8} more' if len(torn) > 8 else ''}: a weight of quanto is loaded from "
                    "all of its tensors."
                )
            for name in {_weight_of(key) for key in missing}:
                model.get_submodule(name).register_forward_pre_hook(_has_its_weight)
            # For the warning that diffusers logs for a plain layer.
            return [*found, *sorted(missing - set(found))]

        return update_missing_keys

    def make_created(original):
        def create_quantized_param(self, model, param_value, param_name, *args, **kwargs):
            if self.pre_quantized:
                param_value = _fitted(model, param_value, param_name)
            return original(self, model, param_value, param_name, *args, **kwargs)

        return create_quantized_param

    quantizer_class = resolve(quanto_quantizer, "QuantoQuantizer")
    draft.wrap_plain(quantizer_class, "check_quantized_param_shape", make_shape)
    draft.wrap_plain(quantizer_class, "create_quantized_param", make_created)
    draft.wrap_plain(quantizer_class, "update_missing_keys", make_missing)


def _compare(param_name: str, current_param: Any, loaded_param: Any, columns: int | None = None) -> None:
    """Raise ValueError if a part in the checkpoint does not fit the model's.

    Args:
        columns: how many numbers a scale of the last axis has; None if unknown.
    """
    shape, wanted = tuple(loaded_param.shape), tuple(current_param.shape)
    if shape == wanted:
        return
    if param_name.endswith(("._scale", "._shift")):
        # One number is the scale of all rows: quanto multiplies by it.
        if loaded_param.numel() in (1, current_param.numel()):
            return
        # As ``quantize_weight(..., axis=-1)`` makes it.
        if len(shape) == len(wanted) and loaded_param.numel() == shape[-1] and columns in (None, shape[-1]):
            return
    raise ValueError(f"{param_name} has the shape {shape} in the checkpoint, but {wanted} in the model.")


def _fitted(model: Any, loaded_param: Any, param_name: str) -> Any:
    """The checkpoint's part in the shape of the model's, if it has as many numbers.

    Raises:
        ValueError: it does not fit.
    """
    *path, name = param_name.split(".")
    weight = functools.reduce(getattr, path, model)
    current = getattr(weight, name)
    if loaded_param.shape == current.shape or name not in ("_scale", "_shift"):
        return loaded_param
    # A scale per group, or per row: only in the latter case can there be one for the last axis.
    columns = weight.shape[-1] if current.shape[0] == weight.shape[0] else 0
    _compare(param_name, current, loaded_param, columns)
    rows = loaded_param.numel() == current.numel() and tuple(loaded_param.shape) != (1, columns)
    return loaded_param.reshape(current.shape) if rows else loaded_param


def _torn(model: Any, missing: set[str]) -> list[str]:
    """The missing parts whose weight has another part in the checkpoint."""
    if not missing:
        return []
    found = {_weight_of(key) for key in model.state_dict() if key not in missing and _is_part(model, key)}
    return [key for key in missing if _weight_of(key) in found]


def _has_its_weight(layer: Any, args: tuple[Any, ...]) -> None:
    """A forward pre-hook of a layer whose weight was missing: torch silently computes with a weight on meta."""
    # An offloaded layer's weight is also on meta between passes: accelerate onloads it after this hook.
    if layer.weight.is_meta and not hasattr(layer, "_hf_hook"):
        raise RuntimeError(
            f"the checkpoint had no weight for this {type(layer).__name__} of {layer.in_features} to "
            f"{layer.out_features} features, and none has been set since: see the warning about missing keys."
        )


def _weight_of(key: str) -> str:
    return key.rpartition(".weight.")[0]


def _is_part(model: Any, key: str) -> bool:
    """Whether ``key`` is the name of a tensor inside a quanto weight."""
    from optimum.quanto import QModuleMixin

    name, _, part = key.rpartition(".weight.")
    return part in _PARTS and isinstance(model.get_submodule(name), QModuleMixin)
