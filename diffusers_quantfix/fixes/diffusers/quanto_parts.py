"""diffusers loads a damaged checkpoint of quanto's weights without an error.

Symptom: a saved model with weights of quanto whose ``weight._scale`` or ``weight._shift`` has another shape, or whose
    ``weight._shift`` is missing, gives wrong output; without ``weight._scale`` or ``weight._data`` it cannot be run.
    ``from_pretrained`` says nothing.
Cause: for the parts of a weight diffusers leaves the comparison of shapes to its quantizer, and ``QuantoQuantizer``
    does not compare; its ``update_missing_keys`` drops the names of all parts, whose tensors stay on meta.
Upstream: not reported; diffusers drops quanto with 1.0.
Patch: both raise ValueError with the name of the tensor, before anything is loaded or while it is.
"""

from __future__ import annotations

from ...engine.fix import Fix
from ...engine.probe import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

FIX = Fix(
    id="diffusers-quanto-parts",
    title="diffusers loads a damaged checkpoint of quanto's weights without an error",
    module="diffusers.quantizers.quanto.quanto_quantizer",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    upstream=(),
    symptom="wrong output of a saved model with weights of quanto whose weight._scale or weight._shift is missing or "
    "has another shape",
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
    """Is a shape compared that no weight of the model has?"""
    import torch

    quantizer_class = resolve(quanto_quantizer, "QuantoQuantizer")
    quantizer = quantizer_class.__new__(quantizer_class)
    try:
        quantizer.check_quantized_param_shape("weight._scale", torch.empty(2, 1), torch.empty(1, 2))
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
            missing = [key for key in missing_keys if _is_part(model, key)] if self.pre_quantized else []
            if missing:
                raise ValueError(
                    f"the checkpoint has no {', '.join(sorted(missing)[:8])}"
                    f"{f' and {len(missing) - 8} more' if len(missing) > 8 else ''}: a weight of quanto is loaded from "
                    "all of its tensors."
                )
            return original(self, model, missing_keys, *args, **kwargs)

        return update_missing_keys

    quantizer_class = resolve(quanto_quantizer, "QuantoQuantizer")
    draft.wrap_plain(quantizer_class, "check_quantized_param_shape", make_shape)
    draft.wrap_plain(quantizer_class, "update_missing_keys", make_missing)


def _compare(param_name: str, current_param: Any, loaded_param: Any) -> None:
    """Raise ValueError where the part of a checkpoint has not the shape of the model's."""
    # One number is the scale of all rows: quanto multiplies by it.
    one = loaded_param.numel() == 1 and param_name.endswith(("._scale", "._shift"))
    if current_param.shape != loaded_param.shape and not one:
        raise ValueError(
            f"{param_name} has the shape {tuple(loaded_param.shape)} in the checkpoint, but "
            f"{tuple(current_param.shape)} in the model."
        )


def _is_part(model: Any, key: str) -> bool:
    """Is ``key`` the name of a tensor inside of a weight of quanto?"""
    from optimum.quanto import QModuleMixin

    name, _, part = key.rpartition(".weight.")
    return part in _PARTS and isinstance(model.get_submodule(name), QModuleMixin)
