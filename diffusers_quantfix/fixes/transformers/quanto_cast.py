"""Casting a transformers model quantized by quanto fails midway and leaves it half cast.

Symptom: ``text_encoder.to(dtype)`` or ``.bfloat16()`` raises ValueError "The dtype of a weights Tensor cannot be
    changed". After that the embeddings and norms before the first quantized layer keep the new dtype: the next run
    raises "expected scalar type BFloat16 but found Float", or its output differs.
Cause: ``PreTrainedModel`` refuses ``half()`` and ``float()`` of a quantized model, and ``to`` of a bitsandbytes model;
    for quanto the cast begins, and the first quantized weight raises.
Upstream: not reported.
Patch: a cast to another dtype raises before anything is changed, and says what to do.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.casting import asked_dtype, is_casting
from ...weights.wrappers import backend_of, is_wrapper

FIX = Fix(
    __doc__,
    id="transformers-quanto-cast",
    module="transformers.modeling_utils",
    claims={"transformers": ">=4.46.0,<=5.24.0", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(
        r"The dtype of a \w* ?weights Tensor cannot be changed",
        r"WeightQ\w+Tensor cannot be changed",
    ),
    frames=("torch/nn/modules/module.py:bfloat16", r"encoder\w*\.(to|type|bfloat16)\("),
    since="0.1.0",
    asked_once=True,
)

_REFUSED = (
    "A model quantized by quanto cannot be cast from {} to {}; nothing was changed. Reload it with "
    "`from_pretrained(..., torch_dtype={})`, or call `dequantize()` first."
)
_METHODS = ("bfloat16", "double", "type")


def broken(modeling_utils: ModuleType) -> bool:
    """Does a cast of a model with ``quantization_method`` "quanto" begin?

    The stand-in has no weights, so nothing is cast.
    """
    torch = sys.modules["torch"]
    cls = resolve(modeling_utils, "PreTrainedModel")
    begun = []

    class StandIn(cls):  # type: ignore[misc,valid-type]
        is_quantized, quantization_method = True, "quanto"

        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            begun.append(True)
            return self

    try:
        object.__new__(StandIn).to(dtype=torch.float64)
    except ValueError:
        return False
    return bool(begun)


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    cls = resolve(modeling_utils, "PreTrainedModel")

    def make_to(original):
        def to(self, *args, **kwargs):
            if not is_casting():
                refuse(self, asked_dtype(args, kwargs) or dtype_of_a_tensor(args, kwargs))
            return original(self, *args, **kwargs)

        return to

    def make(name, original):
        def cast(self, *args, **kwargs):
            dtype = sys.modules["torch"].bfloat16 if name == "bfloat16" else sys.modules["torch"].float64
            refuse(self, args[0] if name == "type" and args else kwargs.get("dst_type", dtype))
            return original(self, *args, **kwargs)

        return cast

    draft.wrap_plain(cls, "to", make_to)
    for name in _METHODS:
        draft.wrap_plain(cls, name, functools.partial(make, name))


def dtype_of_a_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dtype of the tensor in ``model.to(tensor)``."""
    tensors = (*args[:1], kwargs.get("tensor"))
    return next((one.dtype for one in tensors if isinstance(one, sys.modules["torch"].Tensor)), None)


def refuse(model: Any, dtype: Any) -> None:
    """Raise an error if ``model`` has quanto weights of another floating dtype.

    Raises:
        ValueError: it has.
    """
    if dtype is None or not getattr(model, "is_quantized", False):
        return
    for weight in model.parameters():
        if is_wrapper(weight) and backend_of(weight) == "optimum" and weight.dtype != dtype:
            raise ValueError(_REFUSED.format(weight.dtype, dtype, dtype))
