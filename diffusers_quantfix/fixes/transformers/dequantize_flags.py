"""A dequantized text encoder is still marked as quantized.

Symptom: after ``model.dequantize()`` a cast raises "You cannot cast a bitsandbytes model in a new `dtype`", and a
    pipeline does not cast the model; up to 4.46.3 a model saved afterwards cannot be loaded either.
Cause: ``HfQuantizer.dequantize`` leaves ``quantization_method`` and the bitsandbytes flags on the model, and up to
    4.46.3 also ``config.quantization_config``.
Upstream: https://github.com/huggingface/transformers/issues/39295; fixed in 4.54.0.
Patch: everything that the quantizer set on the model is removed together with the quantizer. Twin:
    ``diffusers-dequantize-flags``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.dequantize import IN_CONFIG, forget_quantization

FIX = Fix(
    __doc__,
    id="transformers-dequantize-flags",
    module="transformers.quantizers.base",
    claims={"transformers": ">=4.44.2,<4.54"},
    patterns=("cannot cast a bitsandbytes model in a new( dtype|[.])",),
    frames=("dequantize", "transformers/modeling_utils.py"),
    fixed_in="transformers 4.54.0",
)


def broken(base: ModuleType) -> bool:
    """Dequantize a stand-in that has only the flag and the attributes that upstream deletes."""
    from types import SimpleNamespace

    quantizer_class = resolve(base, "HfQuantizer")

    class Quantizer:
        remove_quantization_config = getattr(quantizer_class, "remove_quantization_config", None)

        def _dequantize(self, model, **_):
            return model

    config = SimpleNamespace(quantization_config=None, _pre_quantization_dtype=None, dtype=None)
    model = SimpleNamespace(hf_quantizer=None, quantization_method="bitsandbytes", config=config)
    quantizer_class.dequantize(Quantizer(), model)
    return "quantization_method" in vars(model)


def patch(base: ModuleType, draft: Draft) -> None:
    def make(original):
        def dequantize(self, model):
            model = original(self, model)
            forget_quantization(model)
            for name in IN_CONFIG:
                vars(model.config).pop(name, None)
            return model

        return dequantize

    draft.wrap_plain(resolve(base, "HfQuantizer"), "dequantize", make)
