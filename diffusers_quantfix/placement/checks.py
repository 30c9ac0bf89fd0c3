"""Examines one component: a record of every tensor, and why a tensor is misplaced."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine.interruptions import heed_interruption
from .components import is_module
from .modules import modules_of
from .offloaded import HOOK_ATTRIBUTES, offload_kind, onloaded_by_hooks
from .report import Misplaced, TensorRecord
from .tensors import BEFORE_MERGE, Held, device_name, nbytes

__all__ = ["Examined", "examine"]

# The attributes of a MatmulLtState that hold the weight in another form, or its scales. The others are by-products of a
# forward pass.
_EIGHT_BIT_COMPANIONS = frozenset({"CB", "SCB", "CxB", "SB", "CBt", "SCBt", "CxBt", "SBt"})
_NO_DATA = "is on meta and no offload hook will fill it: it has no data"


@dataclass
class Examined:
    """The findings for one component; ``offload`` is its `offload_kind`."""

    records: list[TensorRecord] = field(default_factory=list)
    misplaced: list[Misplaced] = field(default_factory=list)
    offload: str = ""


def examine(value: Any, held: Sequence[Held], sizes: Sequence[int]) -> Examined:
    """Examine one component.

    Args:
        value: a module, or any object that holds tensors.
        held: all its tensors.
        sizes: the bytes that each tensor adds to the memory of its device.
    """
    hooked = is_module(value) and _is_hooked(value)
    result = Examined(offload=offload_kind(value) if hooked else "")
    fetched = onloaded_by_hooks(value) if hooked else set()
    result.records = [_record(one, size) for one, size in zip(held, sizes, strict=True)]
    pairs = list(zip(held, result.records, strict=True))
    home = _home(pairs) if is_module(value) and not result.offload else ""
    for one, record in pairs:
        reason = _fault(one, record, fetched, home)
        if reason:
            result.misplaced.append(Misplaced(record, reason))
    return result


def _is_hooked(root: Any) -> bool:
    return "hf_device_map" in vars(root) or any(
        not vars(module).keys().isdisjoint(HOOK_ATTRIBUTES) for module in modules_of(root)
    )


def _record(held: Held, size: int) -> TensorRecord:
    tensor = held.tensor
    return TensorRecord(
        held.component,
        held.name,
        held.kind,
        device_name(tensor.device),
        _dtype_name(tensor.dtype),
        _shape(tensor),
        size,
    )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tuple(tensor.shape)
    except RuntimeError as error:  # a lazy parameter, and a nested tensor, whose rows differ in length
        heed_interruption(error)
        return ()


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _home(pairs: list[tuple[Held, TensorRecord]]) -> str:
    """The device with most bytes of a component's weights and buffers, or ""."""
    sums: dict[str, int] = {}
    for held, record in pairs:
        if held.kind in ("weight", "buffer") and record.device != "meta":
            sums[record.device] = sums.get(record.device, 0) + nbytes(held.tensor)
    return max(sums, key=lambda device: sums[device]) if sums else ""


def _fault(held: Held, record: TensorRecord, fetched: set[int], home: str) -> str:
    """Why the tensor is misplaced, or ""."""
    if held.kind in ("attribute", "gradient", "offloaded", BEFORE_MERGE):
        return ""
    # The usual case first: a model may have 100,000 tensors.
    if record.device == home and held.outer is None and held.kind in ("weight", "buffer"):
        return ""
    if nbytes(held.tensor) == 0:
        return ""
    is_fetched = id(held.module) in fetched
    if held.kind in ("quant state", "8-bit state"):
        return _companion_fault(held, record, is_fetched)
    if record.device == "meta":
        return "" if is_fetched else _NO_DATA
    if held.outer is not None and str(held.outer.device) != record.device and not held.outer.is_meta:
        return f"is on {record.device}, the weight that it is part of on {held.outer.device}"
    if home and record.device != home:
        return f"is on {record.device}, most of the component on {home}, without a device map"
    return ""


def _companion_fault(held: Held, record: TensorRecord, is_fetched: bool) -> str:
    attribute = record.name.rpartition(".")[2]
    if held.kind == "8-bit state" and attribute not in _EIGHT_BIT_COMPANIONS:
        return ""
    weight = _weight_of(held)
    if weight is None or str(weight.device) == record.device:
        lost = record.device == "meta" and (held.kind == "quant state" or not is_fetched)
        # The hook keeps CB and SCB of an offloaded 8-bit layer; nothing keeps a 4-bit quant state.
        return _NO_DATA if lost else ""
    if weight.is_meta and is_fetched:
        # The weight is offloaded: its companions may be on the CPU, but not on the device.
        return (
            ""
            if record.device in ("cpu", "meta")
            else f"stays on {record.device} while its weight is offloaded"
        )
    return f"is on {record.device}, its weight on {weight.device}"


def _weight_of(held: Held) -> Any:
    """The quantized parameter to which the companion ``held`` belongs: the one in its path, or the layer's weight."""
    parameters = held.module._parameters
    for part in held.name.split("."):
        if type(parameters.get(part)).__name__ in ("Params4bit", "Int8Params"):
            return parameters[part]
    return parameters.get("weight")
