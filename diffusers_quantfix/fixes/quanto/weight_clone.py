"""Models with quanto weights cannot be deep-copied.

Symptom: ``copy.deepcopy(model)`` raises RuntimeError "The default implementation of __deepcopy__() for wrapper
    subclasses only works for subclass types that implement clone()".
Cause: quanto's tensor classes do not implement ``clone``: a quantized weight becomes a dequantized one, a packed tensor
    an unpacked one.
Upstream: not reported.
Patch: the weight classes get their own ``__deepcopy__``, which copies the tensors inside. ``clone`` stays: peft's SHiRA
    adds to a clone in place and must get a plain tensor, as a quanto tensor does not keep such a sum. Before 0.20 it
    adds to a deep copy of ``weight.data``: a weight that is not a parameter is not copied, as upstream.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="quanto-weight-clone",
    module="optimum.quanto.tensor.weights",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(
        r"implementation of __deepcopy__\(\) for wrapper subclasses only works for subclass types that implement clone",
    ),
    frames=("deepcopy", "quanto"),
    hot=True,
)


def broken(weights: ModuleType) -> bool:
    """Copy a weight of two numbers."""
    import copy

    import torch
    from optimum.quanto.tensor.qtype import qint8

    data = torch.zeros(2, 1, dtype=torch.int8)
    weight = resolve(weights, "WeightQBytesTensor")(
        qint8, 0, data.size(), data.stride(), data, torch.ones(2, 1), None
    )
    try:
        copy.deepcopy(torch.nn.Parameter(weight, requires_grad=False))
    except RuntimeError:
        return True
    return False


def patch(weights: ModuleType, draft: Draft) -> None:
    import copy

    import torch

    def make(original):
        def __deepcopy__(self, memo):
            if id(self) in memo or not self.is_leaf or not isinstance(self, torch.nn.Parameter):
                return original(self, memo)  # which returns that, or raises
            # Under inference mode a tensor from outside it cannot be detached.
            with torch.inference_mode(False), torch.no_grad():
                twin = copied(self, memo)
                twin.requires_grad_(self.requires_grad)
                twin.grad = copy.deepcopy(self.grad, memo)
            return twin

        return __deepcopy__

    def copied(tensor, memo):
        # Each class knows how to detach itself; some cannot be rebuilt from what they report.
        twin = torch.ops.aten.detach.default(tensor)
        memo[id(tensor)] = twin
        # The tensors inside are attributes. A packed one, of whatever class, also has tensors inside.
        for inner in vars(tensor).values():
            if (
                isinstance(inner, torch.Tensor)
                and hasattr(inner, "__tensor_flatten__")
                and id(inner) not in memo
            ):
                copied(inner, memo)
        # As torch does.
        twin.__dict__ = copy.deepcopy(vars(tensor), memo)
        return twin

    for name in ("WeightQBytesTensor", "WeightQBitsTensor"):
        draft.wrap_plain(resolve(weights, name), "__deepcopy__", make)
