"""Refuses to merge an adapter into a quantized weight that its peft layer does not support.

Only LoRA, LoKr and LoHa can be merged into optimum-quanto weights, with our fixes. The other adapters compute a plain
weight and assign it to ``.data``, which changes nothing that the layer uses. Adapters without a class for bitsandbytes
do the same with 8-bit weights, and treat the packed bytes of 4-bit weights as values. Some of the 4-bit classes do not
quantize the result.

Neither torch nor another library is imported here.

Upstream: ``merge`` of the layers in peft/tuners/*/layer.py and peft/tuners/*/bnb.py.
"""

from __future__ import annotations

from ..engine.probe import names_used, written_in
from . import merging_quanto

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = ["holds", "refuse_merge"]

_TOUCHES_WEIGHT = {"weight", "get_base_weight", "set_base_weight"}


def holds(layer: Any, name: str) -> bool:
    """Whether a peft layer has parameters of the adapter ``name``."""
    # In peft 0.20 UniLora lists no trainable ones: they belong to the model.
    attributes = layer.adapter_layer_names or layer.other_param_names
    return any(name in getattr(layer, attribute, ()) for attribute in attributes)


def refuse_merge(layer: Any, names: Iterable[str]) -> None:
    """Raise if adapters cannot be merged into the weight of the base layer.

    Args:
        layer: a peft layer.
        names: the adapters; names that this layer does not have are ignored.

    Raises:
        ValueError: merging one of them would have no effect, or destroy the weight.
    """
    effect = _effect(layer) if any(holds(layer, name) for name in names) else None
    if effect is not None:
        cls = type(layer)
        raise ValueError(
            f"an adapter in a {cls.__name__} of {cls.__module__} cannot be merged into a "
            f"{type(layer.get_base_layer().weight).__name__}: {effect}. It works without being merged. To "
            "merge it, load the model without quantization, or call dequantize() of the model before the adapter is "
            "added"
        )


def _effect(layer: Any) -> str | None:
    """What merging would do wrong, for the message; None if it is correct or raises an error by itself."""
    merge = type(layer).merge
    original = merge
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__
    # HiRA's ``merge`` calls ``_merge``, which its layers share.
    shared = names_used(type(layer)._merge) if "_merge" in names_used(original) else set()
    if not (names_used(original) | shared) & _TOUCHES_WEIGHT:
        return None
    weight = getattr(layer.get_base_layer(), "weight", None)
    of_bitsandbytes = type(layer).__module__.endswith(".bnb")
    known = of_bitsandbytes or getattr(layer, "quantization_backend", None) is not None
    for cls in type(weight).__mro__:
        if cls.__name__ == "QTensor" and cls.__module__.startswith("optimum.quanto"):
            return None if written_in(merge, merging_quanto.__name__) else "it would no longer have an effect"
        if cls.__name__ == "Int8Params":
            if not known:
                return "the layer would keep using the old weight"
            return "something other than the adapter would be added" if _is_garbled(layer) else None
        if cls.__name__ == "Params4bit":
            if not known:
                return "it would be added to the packed bytes"
            if of_bitsandbytes and "bnb_quantized" not in names_used(original):
                return "the sum would be treated as packed bytes"
            return None
    return None


def _is_garbled(layer: Any) -> bool:
    """Whether peft multiplies the two factors of a RandLora in the wrong order; the shape may be right all the same.

    In peft/tuners/randlora/layer.py both are transposed, in bnb.py they are not.
    """
    cls = type(layer)
    return cls.__module__ == "peft.tuners.randlora.bnb" and "T" not in names_used(cls.get_delta_weight)
