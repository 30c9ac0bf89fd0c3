"""Models loaded with llm_int8_has_fp16_weight=True cannot run.

Symptom: AttributeError "'Tensor' object has no attribute 'CB'" (diffusers), "'Parameter' object has no attribute 'CB'"
    (transformers) or the same for 'SCB' from the first run of a model loaded onto a GPU with
    ``BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True)``.
Cause: ``Int8Params`` moved from the CPU quantizes itself; one with ``has_fp16_weights``, which stays in 16 bits, is
    moved by ``Tensor.to``, which returns a plain tensor. The loaders put it into the model, and
    ``Linear8bitLt.forward`` reads its ``CB``.
Upstream: not reported.
Patch: the moved weight is an ``Int8Params`` too, as after every other move.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="bnb-int8-fp16-weights",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    patterns=("'(Tensor|Parameter)' object has no attribute 'S?CB'",),
    frames=("bitsandbytes/nn/modules.py:forward", "llm_int8_has_fp16_weight|has_fp16_weights"),
    since="0.1.0",
    hot=True,
)


def broken(modules: ModuleType) -> bool:
    """Move a weight in 16 bits: is the result no Int8Params?"""
    import torch

    class Parameter(torch.nn.Parameter):
        """In the place of the base class, which cannot move to a GPU that is not there."""

        def to(self, *args, **kwargs):
            return self.data

        cuda = to

    class Weight(resolve(modules, "Int8Params"), Parameter):  # type: ignore[misc]
        """Its base classes are Int8Params, then the one above."""

    weight = Weight(torch.zeros(1, 1, dtype=torch.float16), requires_grad=False, has_fp16_weights=True)
    moved = getattr(weight, _name(modules))(torch.device("meta"))
    return not isinstance(moved, modules.Int8Params)


def patch(modules: ModuleType, draft: Draft) -> None:
    int8_params = resolve(modules, "Int8Params")

    def make(original):
        def moved_in_16_bits(self, *args, **kwargs):
            moved = original(self, *args, **kwargs)
            if isinstance(moved, int8_params):
                return moved
            return int8_params(
                moved, requires_grad=self.requires_grad, has_fp16_weights=self.has_fp16_weights
            )

        return moved_in_16_bits

    draft.wrap_plain(int8_params, _name(modules), make)


def _name(modules: ModuleType) -> str:
    """The method that a weight on the CPU is moved with; before bitsandbytes 0.46, ``to`` calls ``cuda``."""
    return "_quantize" if hasattr(modules.Int8Params, "_quantize") else "cuda"
