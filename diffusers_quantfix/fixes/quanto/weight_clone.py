"""A model with weights of quanto cannot be deep-copied.

Symptom: ``copy.deepcopy(model)`` ends in RuntimeError "The default implementation of __deepcopy__() for wrapper
    subclasses only works for subclass types that implement clone()".
Cause: the tensor classes of quanto do not know ``clone``: a quantized weight becomes a dequantized one, a packed
    tensor an unpacked one.
Upstream: not reported.
Patch: ``__torch_dispatch__`` of these classes clones the tensors inside. A clone in another memory format is still
    dequantized, as before.
"""

from __future__ import annotations

from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

FIX = Fix(
    id="quanto-weight-clone",
    title="models with weights of quanto cannot be deep-copied",
    module="optimum.quanto.tensor.weights",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    upstream=(),
    symptom="RuntimeError: The default implementation of __deepcopy__() for wrapper subclasses only works for "
    "subclass types that implement clone()",
    patterns=(
        r"implementation of __deepcopy__\(\) for wrapper subclasses only works for subclass types that implement clone",
    ),
    frames=("deepcopy", "quanto"),
    hot=True,
)


def broken(weights: ModuleType) -> bool:
    """Clone a weight of two numbers."""
    import torch
    from optimum.quanto.tensor.qtype import qint8

    cls = resolve(weights, "WeightQBytesTensor")
    data = torch.zeros(2, 1, dtype=torch.int8)
    return type(cls(qint8, 0, data.size(), data.stride(), data, torch.ones(2, 1), None).clone()) is not cls


def patch(weights: ModuleType, draft: Draft) -> None:
    import torch

    aten = torch.ops.aten

    def make(original):
        def __torch_dispatch__(cls, op, types, args, kwargs=None):
            if op.overloadpacket is aten.clone:
                memory_format = (kwargs or {}).get("memory_format")
                if memory_format in (None, torch.preserve_format):
                    return cloned(args[0])
            return original(cls, op, types, args, kwargs)

        return __torch_dispatch__

    def cloned(tensor):
        # Each class knows how to detach itself, and what is inside; some cannot be rebuilt from what they tell.
        copy = aten.detach.default(tensor)
        for name in copy.__tensor_flatten__()[0]:
            setattr(copy, name, getattr(copy, name).clone())
        return copy

    for cls in classes(weights):
        draft.wrap_plain(cls, "__torch_dispatch__", make)


def classes(weights: ModuleType) -> Iterator[Any]:
    """The classes with a ``__torch_dispatch__`` of their own, without those that this release does not have."""
    import importlib

    package = weights.__name__.rpartition(".")[0]
    for module, name in (
        (".weights.qbytes", "WeightQBytesTensor"),
        (".weights.qbits", "WeightQBitsTensor"),
        (".packed", "PackedTensor"),
        (".weights.tinygemm.packed", "TinyGemmPackedTensor"),
        (".weights.awq.packed", "AWQPackedTensor"),
        (".weights.marlin.fp8.packed", "MarlinF8PackedTensor"),
        (".weights.marlin.int4.packed", "MarlinInt4PackedTensor"),
    ):
        try:
            yield resolve(importlib.import_module(package + module), name)
        except (ModuleNotFoundError, TargetMissing):
            continue
