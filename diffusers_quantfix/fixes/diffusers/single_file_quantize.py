"""from_single_file does not quantize an ordinary file.

Symptom: the model is not quantized, without an error, after ``from_single_file`` of an ordinary file with a
    ``quantization_config`` (torchao). With bitsandbytes ValueError "Missing quantization component `SCB`" or "Supplied
    state dict for ... does not contain `bitsandbytes__*`"; with quanto "Cannot copy out of meta tensor; no data!".
Cause: ``FromOriginalModelMixin.from_single_file`` makes the quantizer without ``pre_quantized``, whose default is True.
    ``from_pretrained`` decides by the config in the folder; a single file has none.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/single_file_model.py; not
    reported. The documentation page about quanto says that ``from_single_file`` quantizes.
Patch: before the quantizer prepares the model, it checks the names in the file. If none is specific to a checkpoint of
    its method, the weights are quantized while loading, as ``from_pretrained`` does. The model's config gets the
    quantization config, without which it cannot be loaded after saving.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import function_of, names_used, resolve
from ...weights.method import method_of

FIX = Fix(
    __doc__,
    id="diffusers-single-file-quantize",
    module="diffusers.loaders.single_file_model",
    claims={"diffusers": ">=0.32.0,<=0.42.1"},
    harm="wrong result",
    patterns=(
        "Missing quantization component",
        r"Supplied state dict for .* does not contain (bitsandbytes__\*|and possibly other)",
    ),
    frames=("single_file_model.py:from_single_file", "from_single_file", "loaders/single_file"),
    since="0.1.0",
    asked_once=True,
)

# What names contain in a checkpoint quantized by the method.
_QUANTIZED = {
    "bitsandbytes": (".absmax", ".quant_map", ".quant_state.", ".SCB", ".weight_format"),
    "quanto": ("._data", "._scale"),
    "torchao": ("._weight_",),
}


def broken(single_file_model: ModuleType) -> bool:
    """Is the quantizer made without ``pre_quantized``?"""
    method = resolve(single_file_model, "FromOriginalModelMixin.from_single_file")
    names = names_used(method)
    if "quantization_config" not in names:
        return False
    return not _mentions(method, "pre_quantized")


def _mentions(method: Any, keyword: str) -> bool:
    constants = function_of(method).__code__.co_consts
    return any(keyword in one if isinstance(one, tuple) else one == keyword for one in constants)


def _quantizer() -> Any:
    module = sys.modules.get("diffusers.quantizers.base")
    if module is None:
        raise TargetMissing("this diffusers has no quantizers")
    return resolve(module, "DiffusersQuantizer")


def patch(single_file_model: ModuleType, draft: Draft) -> None:
    def make(original):
        def preprocess_model(self, model, **kwargs):
            # Only from_single_file passes the tensors.
            tensors, method = kwargs.get("state_dict"), method_of(self.quantization_config)
            if not tensors or method not in _QUANTIZED:
                return original(self, model, **kwargs)
            if self.pre_quantized and is_plain(tensors, method):
                self.pre_quantized = False
            result = original(self, model, **kwargs)
            # As from_pretrained does; without it a saved model does not say that it is quantized.
            model.register_to_config(quantization_config=self.quantization_config)
            return result

        return preprocess_model

    draft.wrap_plain(_quantizer(), "preprocess_model", make)


def is_plain(tensors: Mapping[str, Any], method: str) -> bool:
    """Whether a checkpoint is not one of ``method``, and its weights are floating, of 16 bits or more."""
    marks = _QUANTIZED.get(method)
    if marks is None or any(mark in name for name in tensors for mark in marks):
        return False
    weights = [tensor for name, tensor in tensors.items() if name.endswith("weight")]
    return all(
        not hasattr(tensor, "__tensor_flatten__") and tensor.is_floating_point() and tensor.element_size() > 1
        for tensor in weights
    )
