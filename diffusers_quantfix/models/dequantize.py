"""The check that ``dequantize`` needs before it starts, and the quantization attributes that it does not remove.

Upstream: diffusers/quantizers/base.py, transformers/quantizers/base.py.
"""

from __future__ import annotations

from ..offloading.hooks import is_group_offloaded, is_sequentially_offloaded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["IN_CONFIG", "OFFLOADED", "forget_quantization", "refuse_offloaded"]

_ON_MODEL = (
    "quantization_method",
    "is_loaded_in_4bit",
    "is_loaded_in_8bit",
    "is_4bit_serializable",
    "is_8bit_serializable",
)
# The configs of both libraries have these; they have nothing else in common.
IN_CONFIG = ("quantization_config", "_pre_quantization_dtype")
OFFLOADED = (
    "The model is offloaded, and dequantize() would leave it broken: call it before offloading is enabled, or remove "
    "the hooks of offloading first (those of sequential offload: `pipe.remove_all_hooks()`)"
)


def refuse_offloaded(model: Any, call: str = "dequantize()") -> None:
    """Raise for a model whose hooks hold or move the quantized weights, since they would not use the new ones.

    Args:
        model: the model.
        call: the function that the user called, for the message.

    Raises:
        ValueError: the model is offloaded sequentially or in groups.
    """
    if is_sequentially_offloaded(model) or is_group_offloaded(model):
        raise ValueError(OFFLOADED.replace("dequantize()", call))


def forget_quantization(model: Any) -> None:
    """Remove from a model, but not from its config, the attributes that mark it as quantized."""
    for name in _ON_MODEL:
        vars(model).pop(name, None)
    model.is_quantized = False  # diffusers itself does so since 0.39 or 0.40
