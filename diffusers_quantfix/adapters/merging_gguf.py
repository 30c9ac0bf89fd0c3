"""Refuses to merge an adapter into GGUF weights.

diffusers can read most GGUF formats but not write them: a merged layer would stay dequantized. The user can choose that
with `dequantize_lora_layers`, or for all layers with ``dequantize()``.

Writing them would not help. The package gguf writes no K type, and what it writes rounds a LoRA away. Measured with
gguf 0.19, a weight of normal numbers and a delta of 1 % of its size, of rank 16 (in brackets: of 5 %):

- back to Q4_0, the type of the weight: 3 % of the delta are kept (24 %); to Q5_1: 6 % (95 %, with noise of 0.74 deltas)
- to Q8_0: it is kept, with noise of half a delta (0.11), at twice the memory of 4 bits
- dequantized in bfloat16: noise of 0.17 deltas (0.03); in float16 of 0.02 (0.00)

A LoRA that is loaded and not merged has none of this.

Neither torch nor another library is imported here.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["refuse_merge"]


def refuse_merge(model: Any, adapter: str, call: str) -> None:
    """Raise if a layer that ``call`` would merge has a GGUF weight.

    Args:
        model: the model with peft layers.
        adapter: what is merged, for the message: "a LoRA", "an adapter".
        call: the function that the user called, for the message.

    Raises:
        ValueError: there is such a layer.
    """
    count = sum(_is_gguf(layer) for layer in model.modules())
    if count:
        raise ValueError(
            f"{adapter} cannot be merged into GGUF weights ({count} layers of this {type(model).__name__}); it works "
            f"without {call}. To merge it, first call diffusers_quantfix.dequantize_lora_layers() of the model or "
            "pipeline: these layers then take the memory of unquantized ones"
        )


def _is_gguf(layer: Any) -> bool:
    """Whether it is a peft layer whose base layer has a GGUF weight."""
    utils = sys.modules.get("peft.tuners.tuners_utils")
    if utils is None or not isinstance(layer, utils.BaseTunerLayer):
        return False
    return type(getattr(layer.get_base_layer(), "weight", None)).__name__ == "GGUFParameter"
