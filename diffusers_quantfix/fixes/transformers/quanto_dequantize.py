"""A model of transformers that quanto quantized cannot be dequantized.

Symptom: ``model.dequantize()`` ends in NotImplementedError "quanto has no implementation of `dequantize`, please
    raise an issue on GitHub".
Cause: ``QuantoHfQuantizer`` has no ``_dequantize`` of its own.
Upstream: not reported.
Patch: the method is added; it replaces quanto's linear layers by torch's, with the dequantized weights.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    id="transformers-quanto-dequantize",
    title="models of transformers that quanto quantized cannot be dequantized",
    module="transformers.quantizers.quantizer_quanto",
    claims={"transformers": ">=4.46.1,<=5.23.0", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    upstream=(),
    symptom="NotImplementedError: quanto has no implementation of `dequantize`, please raise an issue on GitHub.",
    patterns=("(QUANTO|quanto) has no implementation of dequantize",),
    frames=("transformers/",),
)


def broken(quantizer_quanto: ModuleType) -> bool:
    """Is the method inherited from the base class, which only raises?"""
    cls = resolve(quantizer_quanto, "QuantoHfQuantizer")
    resolve(cls, "_dequantize")
    return "_dequantize" not in vars(cls)


def patch(quantizer_quanto: ModuleType, draft: Draft) -> None:
    def _dequantize(self, model, dtype=None):  # 4.x has no dtype
        from ...models.quanto_layers import dequantized

        return dequantized(model, dtype)

    draft.wrap_plain(
        resolve(quantizer_quanto, "QuantoHfQuantizer"), "_dequantize", lambda original: _dequantize
    )
