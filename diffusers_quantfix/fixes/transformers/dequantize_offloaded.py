"""Dequantizing an offloaded text encoder breaks it.

Symptom: ``model.dequantize()`` raises NotImplementedError "Cannot copy out of meta tensor; no data!" under sequential
    offload. Under group offload it returns, and the next run raises RuntimeError "Expected all tensors to be on the
    same device".
Cause: the quantized layers are replaced by ordinary ones, which the offloading hooks do not know.
Upstream: https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/quantizers/base.py; not reported.
Patch: the error that diffusers models raise here, before anything is replaced. Unquantized layers may be offloaded
    (``llm_int8_enable_fp32_cpu_offload``). Twin: ``diffusers-dequantize-flags``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import Undecided
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.dequantize import OFFLOADED
from ...offloading.hooks import align_hooks, is_group_offloaded, offloaded_stand_in

FIX = Fix(
    __doc__,
    id="transformers-dequantize-offloaded",
    module="transformers.quantizers.base",
    claims={"transformers": ">=4.44.2,<=5.24.0", "accelerate": ""},
    patterns=(
        "Cannot copy out of meta tensor; no data",
        "Expected all tensors to be on the same device",
        "absmax must be float32, got",
    ),
    frames=(r"\bdequantize\(", "quantizers/base.py:dequantize", "transformers/quantizers/"),
)


def broken(base: ModuleType) -> bool:
    """Dequantize an offloaded stand-in; does it get past the check?

    Raises:
        Undecided: accelerate is not imported yet; until then nothing can be offloaded.
    """
    from types import SimpleNamespace

    import torch

    quantizer_class = resolve(base, "HfQuantizer")
    reached = []

    class Quantizer:
        def _dequantize(self, model, **_):
            reached.append(model)
            return model

        def remove_quantization_config(self, model):
            pass

    model = offloaded_stand_in(torch.nn.Module)
    if model is None:
        raise Undecided("accelerate.hooks")
    packed = torch.empty(1, device="meta", dtype=torch.int8)
    model.weight = torch.nn.Parameter(packed, requires_grad=False)
    model.hf_quantizer = model.quantization_method = None
    model.config = SimpleNamespace(quantization_config=None, _pre_quantization_dtype=None, dtype=None)
    try:
        quantizer_class.dequantize(Quantizer(), model)
    except ValueError:
        return False
    return bool(reached)


def patch(base: ModuleType, draft: Draft) -> None:
    def make(original):
        def dequantize(self, model, *args, **kwargs):
            if is_group_offloaded(model) or has_offloaded_quantized_layers(model):
                raise ValueError(OFFLOADED)
            return original(self, model, *args, **kwargs)

        return dequantize

    draft.wrap_plain(resolve(base, "HfQuantizer"), "dequantize", make)


def has_offloaded_quantized_layers(model: Any) -> bool:
    """Whether an accelerate offloading hook holds a quantized weight anywhere in ``model``."""
    modules = model.modules() if isinstance(model, sys.modules["torch"].nn.Module) else ()
    return any(
        is_quantized(parameter)
        for module in modules
        for hook in align_hooks(module)
        if hook.offload
        for parameter in module.parameters(recurse=hook.place_submodules)
    )


def is_quantized(parameter: Any) -> bool:
    torch = sys.modules["torch"]
    dtype = parameter.dtype
    return (
        type(parameter) is not torch.nn.Parameter or not dtype.is_floating_point or bool(dtype.itemsize == 1)
    )
