"""A quantized text encoder loaded from a quantized checkpoint cannot be saved.

Symptom: NotImplementedError from ``revert_weight_conversion`` in ``save_pretrained()`` of a model whose checkpoint was
    already quantized (bitsandbytes 4-bit or 8-bit, torchao), whatever its class. With modules on the CPU or the disk,
    RuntimeError "We could not revert some weight conversions because of offlading". A model quantized while loading can
    be saved.
Cause: ``from_pretrained`` keeps every conversion that it used, including the quantizer's, which builds one weight from
    several tensors of the file. ``save_pretrained`` reverses them all, but ``Bnb4bitDeserialize``,
    ``Bnb8bitDeserialize`` and ``TorchAoDeserialize`` have no ``reverse_op``.
Upstream: https://github.com/huggingface/transformers/pull/45743, closed.
Patch: these conversions are skipped when the others are reversed. What is saved is a state dict, and that already has
    the tensors of the file. The model itself is not changed.
"""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import nested_code, resolve
from ...weights.method import method_of

FIX = Fix(
    __doc__,
    id="transformers-quantized-resave",
    module="transformers.core_model_loading",
    claims={"transformers": ">=5.0.0,<=5.24.0"},
    since="0.1.0",
    patterns=(
        "NotImplementedError from revert_weight_conversion",
        r"revert_weight_conversion.{0,2000}reverse_op.{0,200}NotImplementedError",
        "We could not revert some weight conversions because of offlading",
    ),
    frames=(
        "core_model_loading.py:reverse_op",
        "transformers/core_model_loading.py",
        "revert_weight_conversion",
    ),
)

_OPERATIONS = (
    ("bitsandbytes", "Bnb4bitDeserialize"),
    ("bitsandbytes", "Bnb8bitDeserialize"),
    ("torchao", "TorchAoDeserialize"),
)
# For these methods the state dict to be saved was seen to have the names of the file.
_METHODS = ("bitsandbytes", "torchao")


def broken(core_model_loading: ModuleType) -> bool:
    """Do the operations lack a reverse, and does saving a stand-in with one such conversion need it?"""
    from types import SimpleNamespace

    operation_class: Any = resolve(core_model_loading, "ConversionOps")

    class Deserialize(operation_class):
        hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method=_METHODS[0]))

        def convert(self, input_dict, **_):
            return input_dict

    if all(_has_reverse(core_model_loading, *place) for place in _OPERATIONS):
        return False
    conversion = resolve(core_model_loading, "WeightConverter")(
        ["weight.absmax"], "weight", operations=[Deserialize()]
    )
    model = SimpleNamespace(_weight_conversions=[conversion], config=None)
    try:
        resolve(core_model_loading, "revert_weight_conversion")(model, {})
    except NotImplementedError:
        return True
    return False


def _has_reverse(core_model_loading: ModuleType, integration: str, operation: str) -> bool:
    """Read it from the module's code, since importing it would import bitsandbytes or torchao."""
    from importlib.util import find_spec

    name = f"{core_model_loading.__package__}.integrations.{integration}"
    loader: Any = getattr(find_spec(name), "loader", None)
    code = loader and loader.get_code(name)
    if not code:
        raise TargetMissing(f"there is no {name}")
    try:
        nested_code(nested_code(code, operation), "reverse_op")
    except TargetMissing:
        return False
    return True


def patch(core_model_loading: ModuleType, draft: Draft) -> None:
    no_reverse = resolve(core_model_loading, "ConversionOps.reverse_op")

    def cannot_be_reversed(operation: Any) -> bool:
        quantizer = getattr(operation, "hf_quantizer", None)
        return (
            type(operation).reverse_op is no_reverse
            and method_of(getattr(quantizer, "quantization_config", None)) in _METHODS
        )

    def of_a_quantizer(conversion: Any) -> bool:
        operations = getattr(conversion, "operations", ())
        return bool(operations) and all(map(cannot_be_reversed, operations))

    def make(original):
        def revert_weight_conversion(model, state_dict, *args, **kwargs):
            conversions = getattr(model, "_weight_conversions", None) or []
            kept = [conversion for conversion in conversions if not of_a_quantizer(conversion)]
            if len(kept) < len(conversions):
                model = copy.copy(model)
                model._weight_conversions = kept
            return original(model, state_dict, *args, **kwargs)

        return revert_weight_conversion

    draft.wrap_plain(core_model_loading, "revert_weight_conversion", make)
