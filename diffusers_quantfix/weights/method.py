"""The quantization method of a model or of a quantization config.

Upstream: ``quantization_method`` of models in diffusers and transformers, ``quant_method`` of their configs; an enum,
or plain text where a config came from JSON.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def method_of(model_or_config: Any) -> str:
    """The name of the method ("bitsandbytes", "quanto", "gguf", "torchao", ...); "" if there is none."""
    method = getattr(model_or_config, "quantization_method", None)
    # bitsandbytes configs of diffusers and transformers have a method of that name, which returns e.g. "nf4".
    if method is None or callable(method):
        method = getattr(model_or_config, "quant_method", None)
    return "" if method is None else str(getattr(method, "value", method))
