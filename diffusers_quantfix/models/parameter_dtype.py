"""Which dtype a quantized model of diffusers computes in: neither an integer nor that of its adapters.

Neither torch nor another library is imported here at module level.

Upstream: diffusers/models/modeling_utils.py (``get_parameter_dtype``).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["TUNERS", "floating"]

TUNERS = "peft.tuners.tuners_utils"


def floating(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``get_parameter_dtype``: of a quantized model, the dtype that it computes in."""

    def get_parameter_dtype(parameter: Any) -> Any:
        return _floating_dtype(parameter, original(parameter))

    return get_parameter_dtype


def _floating_dtype(model: Any, found: Any) -> Any:
    """The dtype of ``model``, of which upstream's ``get_parameter_dtype`` says ``found``, a ``torch.dtype`` or None."""
    if found is None:  # a model without a parameter
        return None
    if not found.is_floating_point:
        packed = _of_packed(model)
        if packed is not None:
            return packed
        found = _of_floating(model) or found
    tuners = sys.modules.get(TUNERS)
    return found if tuners is None else _own(model, found, tuners.BaseTunerLayer)


def _own(model: Any, found: Any, tuner: type) -> Any:
    """``found``, unless it is an adapter parameter's and the model has another floating or 4-bit parameter."""
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    of_adapter = False
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or any(part in name for part in kept):
            continue
        if not _is_adapters(model, name, tuner):
            return parameter.dtype if of_adapter else found
        if parameter.dtype != found:  # the answer comes from elsewhere: a hook that casts
            return found
        of_adapter = True
    return (of_adapter and _of_packed(model)) or found


def _of_packed(model: Any) -> Any:
    """The dtype that the 4-bit weights had before quantization; None if there are none."""
    states = (getattr(parameter, "quant_state", None) for parameter in model.parameters())
    return next((state.dtype for state in states if state is not None), None)


def _of_floating(model: Any) -> Any:
    """The dtype of the first floating parameter; None if there is none."""
    return next((one.dtype for one in model.parameters() if one.is_floating_point()), None)


def _is_adapters(model: Any, name: str, tuner: type) -> bool:
    """Whether the parameter of that name belongs to an adapter."""
    owner = model
    for part in name.split("."):
        if isinstance(owner, tuner) and part != "base_layer":
            return True
        owner = getattr(owner, part)
    return False
