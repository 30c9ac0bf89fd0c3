"""A deep copy of a 4-bit model keeps the original in memory.

Symptom: after ``twin = copy.deepcopy(model); del model`` the memory of the original is still taken; the twin takes 11 %
    more than the original, and when it moves, ``twin.layer.quant_state`` stays on the old device.
Cause: ``Params4bit.__deepcopy__`` does not use the memo of the copy. So the new weight refers to the layer of the
    original, and its quant state is not the same copy as the one of the new layer.
Upstream: none.
Patch: ``Params4bit.__deepcopy__`` copies with the memo. The new weight refers to the copied layer, or to no layer where
    the parameter is copied alone.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

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

    def make(original):
        def __deepcopy__(self, memo):
            result = make_subclass(type(self), deepcopy(self.data, memo), self.requires_grad)
            memo[id(self)] = result
            held = vars(result)
            for name, value in vars(self).items():
                if name == "module":
                    held[name] = memo.get(id(value))
                elif name not in _NOT_COPIED:
                    held[name] = deepcopy(value, memo)
            return result

        return __deepcopy__

    draft.wrap_plain(resolve(modules, "Params4bit"), "__deepcopy__", make)
