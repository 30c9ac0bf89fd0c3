"""A dequantized model is still marked as quantized.

Symptom: a model saved after ``model.dequantize()`` cannot be loaded (ValueError "Supplied state dict for ... does not
    contain `bitsandbytes__*`"), ``pipe.to(dtype)`` warns that it "has been loaded in `bitsandbytes` 4bit" and does
    nothing, ``model.to(...)`` and ``.cuda()`` raise "not supported for `8-bit`" in releases where they do so for 8-bit
    models. After ``dequantize()`` of a model under sequential or group offload the next run produces noise (8-bit,
    sequential), or raises "Trying to set a tensor of shape ..." or "found at least two devices".
Cause: ``DiffusersQuantizer.dequantize`` deletes the quantizer and sets ``is_quantized``. The quantization config in the
    model's config, ``quantization_method`` and ``is_loaded_in_4bit`` / ``8bit`` stay. The offloading hooks, which hold
    or move the quantized weights, are not updated with the new ones.
Upstream: not reported for diffusers; the same bug in transformers is
    https://github.com/huggingface/transformers/issues/39295.
Patch: everything that the quantizer set on the model is removed together with the quantizer. Models of quantizers that
    cannot dequantize are not touched: upstream raises earlier. For an offloaded model an error is raised before
    anything is changed.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.dequantize import IN_CONFIG, forget_quantization, refuse_offloaded

FIX = Fix(
    __doc__,
    id="diffusers-dequantize-flags",
    module="diffusers.quantizers.base",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    patterns=(
        r"does not contain (bitsandbytes__\*|and possibly other)",
        "Missing quantization component",
        "Casting a quantized model to a new (dtype )?is unsupported",
    ),
    frames=("dequantize",),
)


def broken(base: ModuleType) -> bool:
    """Dequantize a stand-in that has nothing but the flag."""
    from types import SimpleNamespace

    quantizer = SimpleNamespace(_dequantize=lambda model: model)
    model = SimpleNamespace(hf_quantizer=None, quantization_method="bitsandbytes")
    resolve(base, "DiffusersQuantizer").dequantize(quantizer, model)
    return "quantization_method" in vars(model)


def patch(base: ModuleType, draft: Draft) -> None:
    def make(original):
        def dequantize(self, model):
            refuse_offloaded(model)
            model = original(self, model)
            forget(model)
            return model

        return dequantize

    def forget(model):
        forget_quantization(model)
        config = getattr(model, "_internal_dict", None)
        # Some entries are only attributes of the dictionary, not keys.
        if config is not None and any(name in config or name in vars(config) for name in IN_CONFIG):
            model._internal_dict = type(config)(
                {key: value for key, value in config.items() if key not in IN_CONFIG}
            )

    draft.wrap_plain(resolve(base, "DiffusersQuantizer"), "dequantize", make)
