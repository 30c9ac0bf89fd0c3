"""diffusers and transformers models quantized by quanto cannot be dequantized.

Symptom: ``model.dequantize()`` raises NotImplementedError "QuantizationMethod.QUANTO has no implementation of
    `dequantize`, please raise an issue on GitHub", in transformers "quanto has no implementation".
Cause: ``QuantoQuantizer`` and ``QuantoHfQuantizer`` have no ``_dequantize`` of their own.
Upstream: not reported; diffusers drops quanto with 1.0.
Patch: the method is added; it replaces quanto's linear layers with torch's, with the dequantized weights.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve

_CLASSES = {"quanto_quantizer": "QuantoQuantizer", "quantizer_quanto": "QuantoHfQuantizer"}

FIX = Fix(
    __doc__,
    id="quanto-models-dequantize",
    targets=(
        Target(
            "diffusers-quanto-dequantize",
            "diffusers.quantizers.quanto.quanto_quantizer",
            {"diffusers": ">=0.33.0,<=0.42.1", "optimum-quanto": ">=0.2.5,<=0.2.7"},
        ),
        Target(
            "transformers-quanto-dequantize",
            "transformers.quantizers.quantizer_quanto",
            {"transformers": ">=4.46.1,<=5.24.0", "optimum-quanto": ">=0.2.5,<=0.2.7"},
        ),
    ),
    patterns=("(QUANTO|quanto)(, or quanto,)? has no implementation of dequantize",),
    frames=("diffusers/|transformers/",),
)


def broken(module: ModuleType) -> bool:
    """Is the method inherited from the base class, which only raises?"""
    cls = _quantizer(module)
    resolve(cls, "_dequantize")
    return "_dequantize" not in vars(cls)


def patch(module: ModuleType, draft: Draft) -> None:
    def _dequantize(self, model, dtype=None):  # diffusers and transformers 4 pass no dtype
        from ...models.quanto_layers import dequantized

        return dequantized(model, dtype)

    draft.wrap_plain(_quantizer(module), "_dequantize", lambda original: _dequantize)


def _quantizer(module: ModuleType) -> type:
    cls: type = resolve(module, _CLASSES[module.__name__.rpartition(".")[2]])
    return cls
