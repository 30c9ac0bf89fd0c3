"""A deep copy of a 4-bit model keeps the original in memory.

Symptom: after ``twin = copy.deepcopy(model); del model`` the original's memory is not freed; the twin takes 11 % more
    than the original, and when it moves, ``twin.layer.quant_state`` stays on the old device.
Cause: ``Params4bit.__deepcopy__`` ignores the memo. So the new weight refers to the original's layer, and its quant
    state is not the same copy as the new layer's.
Upstream: none.
Patch: ``Params4bit.__deepcopy__`` copies with the memo. The new weight refers to the copied layer, or to no layer if
    the parameter is copied alone. ``__getstate__`` and ``__setstate__`` of a subclass are called, as upstream does.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.rebuilt import of_the_user

FIX = Fix(
    __doc__,
    id="bnb-params4bit-deepcopy",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    harm="memory or time",
    frames=("deepcopy", "4.?bit"),
    hot=True,
)

# Up to 0.43.1 __getstate__ leaves these two on the parameter; a copy must not have them.
_NOT_COPIED = ("data", "requires_grad")
# Set by the copy itself.
_OF_ITSELF = (*_NOT_COPIED, "module")


def broken(modules: ModuleType) -> bool:
    """Copy a small parameter; does the copy refer to the original's layer?"""
    import copy

    import torch

    resolve(modules, "Params4bit.__deepcopy__")
    layer = torch.nn.Module()
    weight = modules.Params4bit(torch.zeros(32, 1, dtype=torch.uint8), module=layer, bnb_quantized=True)
    return copy.deepcopy(weight).module is layer


def patch(modules: ModuleType, draft: Draft) -> None:
    from copy import deepcopy

    import torch

    make_subclass = torch.Tensor._make_subclass
    base = resolve(modules, "Params4bit")

    def make(original):
        def __deepcopy__(self, memo):
            cls = type(self)
            result = make_subclass(cls, deepcopy(self.data, memo), self.requires_grad)
            memo[id(self)] = result
            # A subclass may omit what cannot be copied, or recreate it.
            state = vars(self) if cls.__getstate__ is base.__getstate__ else self.__getstate__()
            if not isinstance(state, dict):
                result.__setstate__(deepcopy(state, memo))
                return result
            copied = {
                name: memo.get(id(value)) if name == "module" else deepcopy(value, memo)
                for name, value in state.items()
                if name not in _NOT_COPIED
            }
            if cls.__setstate__ is base.__setstate__:
                vars(result).update(copied)
            else:
                # It may call upstream's, which drops everything it does not know.
                vars(result).update((name, copied[name]) for name in of_the_user(self, state, _OF_ITSELF))
                result.__setstate__({**copied, "data": result.data, "requires_grad": result.requires_grad})
            return result

        return __deepcopy__

    draft.wrap_plain(base, "__deepcopy__", make)
