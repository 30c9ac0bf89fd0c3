"""`audit`: where every tensor of a pipeline or model lies, and which of them lie wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .components import accelerators_first, components_of, is_module, readable_name

if TYPE_CHECKING:
    from .checks import Examined

__all__ = ["Audit", "Misplaced", "MisplacedError", "TensorRecord", "audit"]


@dataclass(frozen=True)
class TensorRecord:
    """One tensor.

    Attributes:
        component: the component's name.
        name: the dotted name within the component, e.g. ``blocks.0.proj.weight.quant_state.absmax``.
        kind: "weight", "buffer", "gradient", "quant state", "8-bit state", "offloaded" (what an offload hook keeps
            aside for a weight) or "attribute" (anything else that hangs on the component).
        device: e.g. "cuda:0"; "meta" has no data.
        dtype: e.g. "uint8".
        shape: the shape of the tensor, () for a lazy parameter that has none yet.
        bytes: what it adds to the memory of its device: a byte that two tensors share is counted for the first, so
            the sum is the truth. On "meta" the nominal size.
    """

    component: str
    name: str
    kind: str
    device: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def path(self) -> str:
        """``component.name``."""
        return f"{self.component}.{self.name}" if self.name else self.component


@dataclass(frozen=True)
class Misplaced:
    """A tensor that lies where it should not, and why."""

    tensor: TensorRecord
    reason: str

    def __str__(self) -> str:
        return f"{self.tensor.path} {self.reason}"


class MisplacedError(RuntimeError):
    """Raised by `Audit.raise_if_misplaced`. ``audit`` is the whole answer."""

    def __init__(self, audit: Audit) -> None:
        first, others = audit.misplaced[0], len(audit.misplaced) - 1
        more = f" ({others} more: see the audit)" if others else ""
        super().__init__(f"{audit.subject}: {first}{more}")
        self.audit = audit


@dataclass(frozen=True)
class Audit:
    """What `audit` found. It prints as a table; it holds no tensor, so it keeps no memory alive.

    Attributes:
        subject: the class of what was audited.
        components: name -> class of each component, "None" for one that is not there.
        tensors: every tensor.
        misplaced: those that lie wrong.
        offload: component -> "sequential", "model", "group" or "device map", for those that are spread on purpose.
        notes: sentences worth reading that are no fault.
    """

    subject: str
    components: dict[str, str]
    tensors: tuple[TensorRecord, ...]
    misplaced: tuple[Misplaced, ...]
    offload: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is misplaced."""
        return not self.misplaced

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes per device, each byte of memory once. "meta" holds no memory and is not listed."""
        sums: dict[str, int] = {}
        for record in self.tensors:
            if record.device != "meta" and record.bytes:
                sums[record.device] = sums.get(record.device, 0) + record.bytes
        return dict(sorted(sums.items(), key=lambda item: accelerators_first(item[0])))

    def component_bytes(self) -> dict[str, dict[str, int]]:
        """Component -> device -> bytes, without "meta"."""
        sums: dict[str, dict[str, int]] = {}
        for record in self.tensors:
            if record.device != "meta":
                of_component = sums.setdefault(record.component, {})
                of_component[record.device] = of_component.get(record.device, 0) + record.bytes
        return sums

    def raise_if_misplaced(self) -> None:
        """Raises:
        MisplacedError: a tensor is misplaced; the message names the first.
        """
        if self.misplaced:
            raise MisplacedError(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "subject": self.subject,
            "ok": self.ok,
            "bytes": self.bytes,
            "components": dict(self.components),
            "offload": dict(self.offload),
            "notes": list(self.notes),
            "misplaced": [{**asdict(found.tensor), "reason": found.reason} for found in self.misplaced],
            "tensors": [asdict(record) for record in self.tensors],
        }

    def __str__(self) -> str:
        from .table import audit_table

        return audit_table(self)

    __repr__ = __str__


def audit(model_or_pipe: Any) -> Audit:
    """Where every tensor of a model or pipeline lies: parameters, buffers, and all that torch does not list.

    Counted as well: quant states of bitsandbytes 4-bit layers with their nested states, CB and SCB of 8-bit layers
    before and after their first forward pass, the inner tensors of optimum-quanto and torchao weights, what offload
    hooks keep aside, gradients, and tensors that hang on a module as plain attributes. Nothing is moved or loaded.

    Misplaced is a companion that is not where its weight is; a tensor that lies on another device than the rest of
    its component, unless a device map or offloading put it there; and a tensor on ``meta`` that no offload hook
    will fill.

    Args:
        model_or_pipe: a diffusers pipeline (modular ones, those with components that are None), a
            ``torch.nn.Module``, or a dict of components.

    Returns:
        The audit. ``print`` it, ask ``.ok`` and ``.misplaced``, or call ``.raise_if_misplaced()``.

    Raises:
        TypeError: ``model_or_pipe`` is none of these.
    """
    from .released import released_message

    components = components_of(model_or_pipe, "audit")
    records: list[TensorRecord] = []
    misplaced: list[Misplaced] = []
    offload: dict[str, str] = {}
    notes: list[str] = []
    released = {name: released_message(value) for name, value in components.items()}
    notes += dict.fromkeys(filter(None, (released_message(model_or_pipe) or None, *released.values())))
    if released_message(model_or_pipe):
        notes = notes[:1]
    for component, found in _examined(
        {name: value for name, value in components.items() if not released[name]}
    ):
        records += found.records
        misplaced += found.misplaced
        if found.offload:
            offload[component] = found.offload
    notes += _spread_note(components, records, offload)
    present = {record.component for record in records}
    return Audit(
        subject=readable_name(model_or_pipe),
        components={
            name: type(value).__name__ if value is not None else "None"
            for name, value in components.items()
            if value is None or is_module(value) or name in present
        },
        tensors=tuple(records),
        misplaced=tuple(misplaced),
        offload=offload,
        notes=tuple(notes),
    )


def _examined(components: dict[str, Any]) -> Iterator[tuple[str, Examined]]:
    # Without torch nothing can hold a tensor.
    if "torch" not in sys.modules:
        return
    from .checks import Ledger, examine

    ledger = Ledger()
    for component, value in components.items():
        if value is not None:
            yield component, examine(component, value, ledger)


def _spread_note(
    components: dict[str, Any], records: list[TensorRecord], offload: dict[str, str]
) -> list[str]:
    """Components that lie whole, but on different devices: often meant, and often a move that stopped half-way."""
    where: dict[str, set[str]] = {}
    for record in records:
        if (
            record.kind in ("weight", "buffer")
            and record.device != "meta"
            and record.component not in offload
        ):
            where.setdefault(record.component, set()).add(record.device)
    whole = {component: next(iter(devices)) for component, devices in where.items() if len(devices) == 1}
    if offload or len(set(whole.values())) < 2:
        return []
    by_device: dict[str, list[str]] = {}
    for component, device in whole.items():
        by_device.setdefault(device, []).append(component)
    parts = "; ".join(f"{device}: {', '.join(names)}" for device, names in sorted(by_device.items()))
    return [f"components lie on different devices: {parts}"]
