"""A Control LoRA cannot be loaded into a quantized Flux.

Symptom: RuntimeError "Only Tensors of floating point and complex dtype can require gradients" from
    ``load_lora_weights`` of a Control LoRA. Without an accelerator AttributeError "'NoneType' object has no attribute
    'type'", with diffusers 0.33 "Torch not compiled with CUDA enabled".
Cause: the layer that the LoRA widens is copied into a plain one, which needs numbers, not codes. diffusers 0.32 does
    not dequantize it, 0.33 all but 8-bit layers. Before 0.41, ``_maybe_dequantize_weight_for_expanded_lora`` moves a
    weight to an accelerator first, even one that is not quantized.
Upstream: https://github.com/huggingface/diffusers/issues/10588, https://github.com/huggingface/diffusers/issues/10989
    and https://github.com/huggingface/diffusers/pull/10990 for 4-bit and GGUF,
    https://github.com/huggingface/diffusers/pull/11655 for 8-bit; the rest is not reported.
Patch: the layer is dequantized where it is; on an accelerator only if bitsandbytes cannot do it on the CPU. If it still
    cannot be widened, it is put back. ``diffusers-control-lora-reset`` restores it after the LoRA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from ...adapters.flux_lora import EXPAND, expanding, touched
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...finishing import finished

_DEQUANTIZE = "_maybe_dequantize_weight_for_expanded_lora"  # since 0.33
_WEIGHTS = ("Params4bit", "Int8Params", "GGUFParameter")

FIX = Fix(
    __doc__,
    id="diffusers-control-lora-quantized",
    module="diffusers.loaders.lora_pipeline",
    claims={"diffusers": ">=0.32.0,<0.41.0", "peft": ""},
    fixed_in="diffusers 0.41.0",
    patterns=(
        "Only Tensors of floating point and complex dtype can require gradients",
        _DEQUANTIZE + r".{0,600}'NoneType' object has no attribute 'type'",
        _DEQUANTIZE + r".{0,900}(Torch not compiled with CUDA enabled|Found no NVIDIA driver)",
    ),
    frames=(_DEQUANTIZE, "load_lora_weights", r"control.{0,20}lora"),
    asked_once=True,
)


def broken(lora_pipeline: ModuleType) -> bool:
    """Whether this release dequantizes no such layer, or asks for an accelerator."""
    resolve(lora_pipeline, f"FluxLoraLoaderMixin.{EXPAND}")
    dequantize = getattr(lora_pipeline, _DEQUANTIZE, None)
    return dequantize is None or "get_device" not in names_used(dequantize)


def patch(lora_pipeline: ModuleType, draft: Draft) -> None:
    """Wrap what runs once per widened layer or, in 0.32, once per LoRA."""
    if hasattr(lora_pipeline, _DEQUANTIZE):
        draft.wrap_plain(lora_pipeline, _DEQUANTIZE, _dequantizing)
    else:
        draft.wrap_plain(
            resolve(lora_pipeline, "FluxLoraLoaderMixin"), EXPAND, expanding(_dequantizing_before)
        )


def _dequantizing(original: Any) -> Any:
    def dequantize(model: Any, module: Any) -> Any:
        import torch

        weight = module.weight
        if type(weight).__name__ in _WEIGHTS:
            return _dequantized(model, module)
        return weight.data if type(weight.data) is torch.Tensor else original(model, module)

    return dequantize


@contextlib.contextmanager
def _dequantizing_before(transformer: Any, lora: dict[str, Any], prefix: str) -> Iterator[dict[str, Any]]:
    """What the LoRA widens is dequantized first, and put back if that fails."""
    import torch

    found = []
    for one in touched(transformer, lora, prefix):
        layer = one.layer
        if one.too_small and type(layer.weight).__name__ in _WEIGHTS:
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            plain.weight = torch.nn.Parameter(_dequantized(transformer, layer), requires_grad=False)
            plain.bias = layer.bias
            found.append((one, plain))
    loaded = False

    def steps() -> list[Callable[[], Any]]:
        return [] if loaded else [partial(_put, transformer, one.name, one.layer) for one, _ in found]

    with finished(steps):
        for one, plain in found:
            _put(transformer, one.name, plain)
        yield lora
        loaded = True


def _put(model: Any, name: str, layer: Any) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def _dequantized(model: Any, layer: Any) -> Any:
    """The weight as a plain tensor in the dtype of the layer's bias, or of the model, on its own device."""
    weight, bias = layer.weight, layer.bias
    kind = type(weight).__name__
    if kind == "Params4bit":
        found = _from_4_bits(weight)
    elif kind == "Int8Params":
        found = _from_8_bits(layer)
    else:
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        found = dequantize_gguf_tensor(weight)
    dtype = bias.dtype if bias is not None and bias.is_floating_point() else model.dtype
    return found.to(weight.device, dtype)


def _from_4_bits(weight: Any) -> Any:
    from bitsandbytes.functional import dequantize_4bit

    from ...loading.device import current_accelerator, quantizes_on_cpu
    from ...weights.companions import on_device

    packed, state = weight.data, weight.quant_state
    if packed.device.type == "cpu" and not quantizes_on_cpu():
        there = current_accelerator()
        packed, state = packed.to(there), on_device(state, there)
    return dequantize_4bit(packed, state)


def _from_8_bits(layer: Any) -> Any:
    from ...weights.int8_params import in_tiles, rows_of

    weight = layer.weight
    scales = weight.SCB if getattr(weight, "SCB", None) is not None else layer.state.SCB
    rows = rows_of(layer) if in_tiles(layer) else weight.data
    if rows.is_floating_point() or scales is None:
        return rows
    return rows.float() * (scales.to(rows.device).view(-1, 1) / 127)
