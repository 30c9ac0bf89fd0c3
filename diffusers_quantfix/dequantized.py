"""What a quantizer writes on a model, and ``dequantize`` forgets to take away.

Upstream: diffusers/quantizers/base.py, transformers/quantizers/base.py.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["IN_CONFIG", "forget_quantization"]

_ON_MODEL = (
    "quantization_method",
    "is_loaded_in_4bit",
    "is_loaded_in_8bit",
    "is_4bit_serializable",
    "is_8bit_serializable",
)
# The same in the configs of both libraries, which differ in everything else.
IN_CONFIG = ("quantization_config", "_pre_quantization_dtype")


def forget_quantization(model: Any) -> None:
    """Take from a model, but not from its config, what says that it is quantized."""
    for name in _ON_MODEL:
        vars(model).pop(name, None)
    model.is_quantized = False  # diffusers itself does so since 0.39 or 0.40
