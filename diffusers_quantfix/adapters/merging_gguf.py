"""Refuses to merge an adapter into GGUF weights.

Most formats of GGUF can only be read by diffusers, not written: a merged layer would stay dequantized. That is left to
the user, who has ``dequantize()`` for it.

Neither torch nor another library is imported here.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["refuse_merge"]


def refuse_merge(model: Any, adapter: str, call: str) -> None:
    """Raise where a layer that ``call`` would merge has a GGUF weight.

    Args:
        model: the model with layers of peft.
        adapter: what is to be merged, for the sentence: "a LoRA", "an adapter".
        call: what the user called.

    Raises:
        ValueError: there is such a layer.
    """
    count = sum(_is_gguf(layer) for layer in model.modules())
    if count:
        raise ValueError(
            f"{adapter} cannot be merged into GGUF weights ({count} layers of this {type(model).__name__}); it has its "
            f"effect without {call}. To merge it, call dequantize() of the model before {adapter} is loaded, which "
            "takes the memory of the model without quantization"
        )


def _is_gguf(layer: Any) -> bool:
    """Whether it is a layer of peft over one with a GGUF weight."""
    utils = sys.modules.get("peft.tuners.tuners_utils")
    if utils is None or not isinstance(layer, utils.BaseTunerLayer):
        return False
    return type(getattr(layer.get_base_layer(), "weight", None)).__name__ == "GGUFParameter"
