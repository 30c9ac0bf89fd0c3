"""A model of diffusers that quanto quantized cannot be dequantized.

Symptom: ``model.dequantize()`` ends in NotImplementedError "QuantizationMethod.QUANTO has no implementation of
    `dequantize`, please raise an issue on GitHub".
Cause: ``QuantoQuantizer`` has no ``_dequantize`` of its own.
Upstream: not reported; diffusers drops quanto with 1.0.
Patch: the method is added; it replaces quanto's linear layers by torch's, with the dequantized weights.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    id="diffusers-quanto-dequantize",
    title="models of diffusers that quanto quantized cannot be dequantized",
    module="diffusers.quantizers.quanto.quanto_quantizer",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    upstream=(),
    symptom="NotImplementedError: QuantizationMethod.QUANTO has no implementation of `dequantize`, please raise an "
    "issue on GitHub.",
    patterns=("(QUANTO|quanto) has no implementation of dequantize",),
    frames=("diffusers/",),
)


def broken(quanto_quantizer: ModuleType) -> bool:
    """Is the method inherited from the base class, which only raises?"""
    cls = resolve(quanto_quantizer, "QuantoQuantizer")
    resolve(cls, "_dequantize")
    return "_dequantize" not in vars(cls)


def patch(quanto_quantizer: ModuleType, draft: Draft) -> None:
    def _dequantize(self, model):
        from ...models.quanto_layers import dequantized

        return dequantized(model)

    draft.wrap_plain(
        resolve(quanto_quantizer, "QuantoQuantizer"), "_dequantize", lambda original: _dequantize
    )
