"""Looks at one component: counts its bytes, and finds what is misplaced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .auditing import Misplaced, TensorRecord
from .components import is_module
from .hooks import held_on_meta, offload_kind
from .tensors import Held, held_tensors, is_lazy, nbytes, storage_of, storage_span

__all__ = ["Examined", "Ledger", "component_bytes", "examine"]

# Of a MatmulLtState, these are the weight in another form and its scales. The rest are by-products of a forward pass.
_EIGHT_BIT_COMPANIONS = frozenset({"CB", "SCB", "CxB", "SB", "CBt", "SCBt", "CxBt", "SBt"})
# A whole model's worth of reasons is one sentence each; those on meta are nothing to move back.
_NO_DATA = "is on meta and no offload hook will fill it: it has no data"


@dataclass
class Examined:
    """What was found out about one component."""

    records: list[TensorRecord] = field(default_factory=list)
    misplaced: list[Misplaced] = field(default_factory=list)
    offload: str = ""


class Ledger:
    """Which bytes of which storage have been counted."""

    def __init__(self) -> None:
        self._covered: dict[tuple[str, int], list[tuple[int, int]]] = {}
        # A storage that dies while we count could hand its address on.
        self._alive: list[Any] = []

    def count(self, tensor: Any) -> int:
        """The bytes that ``tensor`` adds to what was counted before."""
        storage = storage_of(tensor)
        if storage is None:
            return nbytes(tensor)
        key = (str(tensor.device), storage._cdata)
        start, end = storage_span(tensor)
        covered = self._covered.get(key)
        if covered is None:
            covered = self._covered[key] = []
            self._alive.append(storage)
            if tensor.device.type not in ("cpu", "meta"):
                # On a device the whole block is taken, whatever part of it is looked at. On the CPU it may be a
                # file that is only mapped.
                covered.append((0, max(storage.nbytes(), end)))
                return int(storage.nbytes())
        new = end - start
        for low, high in covered:
            new -= max(0, min(end, high) - max(start, low))
        if new <= 0:
            return 0
        self._covered[key] = _merged([*covered, (start, end)])
        return int(new)


def examine(component: str, value: Any, ledger: Ledger) -> Examined:
    """Examine one component, a module or any object; tensors counted in ``ledger`` before count nothing here."""
    result = Examined(offload=offload_kind(value) if is_module(value) else "")
    fetched = held_on_meta(value) if is_module(value) else set()
    home = ""
    pairs: list[tuple[Held, TensorRecord]] = []
    for held in held_tensors(component, value):
        record = _record(held, ledger.count(held.tensor))
        result.records.append(record)
        pairs.append((held, record))
    if is_module(value):
        home = "" if result.offload else _home(pairs)
    for held, record in pairs:
        reason = _fault(held, record, fetched, home)
        if reason:
            result.misplaced.append(Misplaced(record, reason))
    return result


def _record(held: Held, count: int) -> TensorRecord:
    tensor = held.tensor
    return TensorRecord(
        component=held.component,
        name=held.name,
        kind=held.kind,
        device=str(tensor.device),
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=() if is_lazy(tensor) else tuple(tensor.shape),
        bytes=count,
    )


def _home(pairs: list[tuple[Held, TensorRecord]]) -> str:
    """The device on which most of a component's weights and buffers lie, "" for none."""
    sums: dict[str, int] = {}
    for held, record in pairs:
        if held.kind in ("weight", "buffer") and record.device != "meta":
            sums[record.device] = sums.get(record.device, 0) + nbytes(held.tensor)
    return max(sums, key=lambda device: sums[device]) if sums else ""


def _fault(held: Held, record: TensorRecord, fetched: set[int], home: str) -> str:
    """Why the tensor is misplaced, "" if it is not."""
    if nbytes(held.tensor) == 0 or held.kind in ("attribute", "gradient", "offloaded"):
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
        # CB and SCB of an offloaded 8-bit layer are kept by the hook; a 4-bit quant state is kept by nobody.
        return _NO_DATA if lost else ""
    if weight.is_meta and is_fetched:
        # The weight rests; its companions may wait on the CPU, but not on the device.
        return (
            ""
            if record.device in ("cpu", "meta")
            else f"stays on {record.device} while its weight is offloaded"
        )
    return f"is on {record.device}, its weight on {weight.device}"


def _weight_of(held: Held) -> Any:
    """The quantized parameter whose companion ``held`` is: it is named in its path, or the layer's weight."""
    parameters = held.module._parameters
    for part in held.name.split("."):
        if type(parameters.get(part)).__name__ in ("Params4bit", "Int8Params"):
            return parameters[part]
    return parameters.get("weight")


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def component_bytes(components: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Component -> device -> bytes without "meta", each byte once; quick enough to be asked at every call."""
    ledger = Ledger()
    sums: dict[str, dict[str, int]] = {}
    for name, component in components.items():
        counts = sums.setdefault(name, {})
        for held in held_tensors(name, component):
            if not held.tensor.is_meta:
                device = str(held.tensor.device)
                counts[device] = counts.get(device, 0) + ledger.count(held.tensor)
    return sums
