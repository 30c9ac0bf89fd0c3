"""Casting a model rounds the packed bytes of 4-bit weights stored in a floating dtype.

Symptom: noise, without an error, after ``model.bfloat16()`` or ``peft_model.to(torch.bfloat16)`` of a 4-bit model with
    ``bnb_4bit_quant_storage=torch.float16``. Dtypes of different sizes raise RuntimeError "shape '[64, 64]' is invalid
    for input of size 2048" in the next run.
Cause: ``torch.nn.Module._apply`` casts every floating parameter. The packed weight has its storage dtype, and its bytes
    are rounded as if they were numbers. ``half``, ``float`` and ``to(dtype)`` of a diffusers or transformers model
    raise; ``bfloat16`` and ``double`` do not, nor do modules that wrap the model, such as peft's.
Upstream: not reported.
Patch: a 4-bit layer keeps the dtype of its packed weight, as it does with uint8, the default, but still moves it. The
    bias is cast.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="bnb-packed-cast",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    harm="wrong result",
    since="0.1.0",
    patterns=(r"(bfloat16|double)\(\).{0,200}quant_storage",),
    frames=("dequantize_4bit", "quant_storage"),
)


def broken(modules: ModuleType) -> bool:
    """Cast a layer whose 4-bit weight is packed in a different floating dtype."""
    import torch

    layer = _bare(resolve(modules, "Linear4bit"))
    packed = torch.zeros(16, 1, dtype=torch.float16, device="cpu")
    layer.weight = modules.Params4bit(packed, requires_grad=False, bnb_quantized=True)
    return layer.bfloat16().weight.dtype is torch.bfloat16


def _bare(layer_class: Any) -> Any:
    import torch

    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    return layer


def patch(modules: ModuleType, draft: Draft) -> None:
    params4bit = resolve(modules, "Params4bit")

    def make(original):
        def _apply(self, fn, recurse=True):
            weight = self._parameters.get("weight")
            packed = isinstance(weight, params4bit) and weight.is_floating_point() and weight.bnb_quantized
            return original(self, sparing(fn, weight) if packed else fn, recurse)

        return _apply

    draft.wrap_plain(resolve(modules, "Linear4bit"), "_apply", make)
    if hasattr(modules, "Embedding4bit"):  # from 0.44.0 on
        draft.wrap_plain(modules.Embedding4bit, "_apply", make)


def sparing(fn: Any, packed: Any) -> Any:
    """``fn``, which casts or moves the tensors of a module, except that ``packed`` is moved without a cast."""

    def applied(tensor):
        result = fn(tensor)
        return result if tensor is not packed or result.dtype == packed.dtype else packed.to(result.device)

    return applied
