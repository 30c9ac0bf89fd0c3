"""Layerwise casting casts the packed bytes of quantized weights.

Symptom: noise, without an error, after ``enable_layerwise_casting`` of a 4-bit model with a floating
    ``bnb_4bit_quant_storage``, as FSDP requires. A model with quanto weights fails with ValueError, one that torchao
    quantized with ``IntxWeightOnlyConfig`` with an AssertionError without a message.
Cause: the hook calls ``module.to(dtype=torch.float8_e4m3fn)`` for every linear layer. The packed weight has the dtype
    bfloat16, and its bytes are rounded as if they were numbers. Of torchao's tensors, ``IntxUnpackedToInt8Tensor``
    alone casts its scales: float8 is refused, float16 rounds them.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/layerwise_casting.py; not reported.
Patch: a layer whose weight is quantized is skipped; it is small already. All other layers are cast as before. The hook
    for a whole model (``skip_modules_pattern=None``) cannot skip a layer, and raises a clear error.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-layerwise-casting-quantized",
    module="diffusers.hooks.layerwise_casting",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    harm="wrong result",
    patterns=(r"intx_unpacked_to_int8_tensor\.py', line \d{1,6}, in to .{0,200}AssertionError",),
    frames=("layerwise_casting", "quant_storage", "intx_unpacked_to_int8_tensor.py:to"),
)


def broken(layerwise_casting: ModuleType) -> bool:
    """Does the hook cast a floating weight that has the class of a 4-bit one?"""
    import torch

    class Params4bit(torch.nn.Parameter):
        pass

    layer = torch.nn.Linear(1, 1, bias=False, device="cpu", dtype=torch.float32)
    layer.weight = Params4bit(torch.zeros(1, 1), requires_grad=False)
    layer.weight.bnb_quantized = True
    layer.weight.quant_state = None
    apply = resolve(layerwise_casting, "apply_layerwise_casting_hook")
    try:
        apply(layer, torch.float16, torch.float32, False)
    except ValueError:  # it refuses
        return False
    return bool(layer.weight.dtype == torch.float16)


def patch(layerwise_casting: ModuleType, draft: Draft) -> None:
    def make(original):
        def apply_layerwise_casting_hook(module, *args, **kwargs):
            packed = [layer for layer in module.modules() if _would_be_cast(layer)]
            if not packed:
                return original(module, *args, **kwargs)
            if packed == [module]:
                return None
            raise ValueError(
                f"layerwise casting of {type(module).__name__} as a whole would cast the packed weights of "
                f"{len(packed)} quantized layers; pass skip_modules_pattern (for example its default) to skip them"
            )

        return apply_layerwise_casting_hook

    draft.wrap_plain(layerwise_casting, "apply_layerwise_casting_hook", make)


def _would_be_cast(layer: Any) -> bool:
    """Whether a cast reaches packed data: integers are left alone by ``module.to(dtype)``."""
    weight = layer._parameters.get("weight")
    if weight is None or not weight.is_floating_point():
        return False
    kind = type(weight)
    if kind.__name__ == "Params4bit":
        return bool(weight.bnb_quantized)
    if kind.__name__ == "IntxUnpackedToInt8Tensor":
        return True
    data = type(weight.data)
    return any(name.startswith("optimum.quanto.") for name in (kind.__module__, data.__module__))
