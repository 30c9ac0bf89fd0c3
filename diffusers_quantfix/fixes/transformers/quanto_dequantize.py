"""A model of transformers that quanto quantized cannot be dequantized.

Symptom: ``model.dequantize()`` ends in NotImplementedError "quanto has no implementation of `dequantize`, please
    raise an issue on GitHub".
Cause: ``QuantoHfQuantizer`` has no ``_dequantize`` of its own.
Upstream: not reported.
Cure: it has one: linear layers of torch with the dequantized weights take the place of quanto's.
"""

from __future__ import annotations

from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    id="transformers-quanto-dequantize",
    title="models of transformers that quanto quantized cannot be dequantized",
    module="transformers.quantizers.quantizer_quanto",
    claims={"transformers": ">=4.46.1,<=5.23.0", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    upstream=(),
    symptom="NotImplementedError: quanto has no implementation of `dequantize`, please raise an issue on GitHub.",
)


def broken(quantizer_quanto) -> bool:
    """Is the method inherited from the base class, which only raises?"""
    cls = resolve(quantizer_quanto, "QuantoHfQuantizer")
    resolve(cls, "_dequantize")
    return "_dequantize" not in vars(cls)


def mend(quantizer_quanto, ledger) -> None:
    def _dequantize(self, model, dtype=None):  # 4.x has no dtype
        from ...models.quanto_layers import dequantized

        return dequantized(model, dtype)

    ledger.replace(resolve(quantizer_quanto, "QuantoHfQuantizer"), "_dequantize", _dequantize)
