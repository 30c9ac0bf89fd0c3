"""The result of `audit`: every tensor, the misplaced ones, and a table of at most 80 columns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..text import WIDTH, human, sums, wrapped
from .components import accelerators_first

__all__ = ["Audit", "Misplaced", "MisplacedError", "TensorRecord"]

# At most this many misplaced tensors are named; the others are counted.
_NAMED = 5


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor.

    Attributes:
        component: the component's name.
        name: the dotted name within the component, e.g. ``blocks.0.proj.weight.quant_state.absmax``.
        kind: "weight", "buffer", "gradient", "quant state", "8-bit state", "offloaded" (kept by an offload hook for a
            weight), "before merge" (a packed weight that is kept on the CPU while an adapter is merged) or "attribute"
            (any other tensor that the component holds).
        device: e.g. "cuda:0"; "meta" has no data.
        dtype: e.g. "uint8".
        shape: the shape of the tensor, () for a lazy parameter that has none yet.
        bytes: the bytes that it adds to the memory of its device: bytes shared by two tensors count for the first, so
            the sum is exact. On "meta" the nominal size.
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
    """A tensor on the wrong device, and the reason."""

    tensor: TensorRecord
    reason: str

    def __str__(self) -> str:
        return f"{self.tensor.path} {self.reason}"


class MisplacedError(RuntimeError):
    """Raised by `Audit.raise_if_misplaced`. ``audit`` is the complete `Audit`."""

    def __init__(self, audit: Audit) -> None:
        first, others = audit.misplaced[0], len(audit.misplaced) - 1
        more = f" ({others} more: see the audit)" if others else ""
        super().__init__(f"{audit.subject}: {first}{more}")
        self.audit = audit

    def __reduce__(self) -> tuple[Any, ...]:
        # A pool whose worker raises it waits for ever if it cannot be read.
        return type(self), (self.audit,), vars(self)


@dataclass(frozen=True)
class Audit:
    """The result of `audit`. It prints as a table, and keeps no tensor alive.

    Attributes:
        subject: the class of the audited object.
        components: name -> class of each component, "None" for a component that is None.
        tensors: every tensor.
        misplaced: the misplaced tensors.
        offload: component -> "sequential", "model", "group" or "device map", for offloaded or mapped components.
        notes: remarks that are not errors.
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
        """Device -> bytes, each byte of memory counted once; without "meta"."""
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
        """Raise if a tensor is misplaced.

        Raises:
            MisplacedError: its message names the first misplaced tensor.
        """
        if self.misplaced:
            raise MisplacedError(self)

    def to_dict(self) -> dict[str, Any]:
        """The audit in JSON types."""
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
        return _table(self)

    __repr__ = __str__


def _table(audit: Audit) -> str:
    """The sums, one line per component, device, kind and dtype, and the misplaced tensors with the reasons."""
    present = [name for name, kind in audit.components.items() if kind != "None"]
    lines = wrapped(f"{audit.subject}: {_count(len(audit.tensors), 'tensor')}, {sums(audit.bytes)}", "", "  ")
    if audit.tensors:
        lines.append(f"{'component':<22}{'device':<9}{'kind':<13}{'dtype':<15}{'tensors':>8}{'bytes':>11}")
    groups: dict[tuple[str, str, str, str], list[TensorRecord]] = {}
    for record in audit.tensors:
        groups.setdefault((record.component, record.device, record.kind, record.dtype), []).append(record)
    previous = ""
    for component in present:
        for (owner, device, kind, dtype), records in groups.items():
            if owner != component:
                continue
            total = human(sum(record.bytes for record in records))
            total = f"({total})" if device == "meta" else f"{total} "
            shown = _shortened(component, 21) if component != previous else ""
            previous = component
            lines.append(f"{shown:<22}{device:<9}{kind:<13}{dtype:<15}{len(records):>8}{total:>12}".rstrip())
    absent = [name for name, kind in audit.components.items() if kind == "None"]
    if absent:
        lines += wrapped(f"set to None: {', '.join(absent)}", "", "  ")
    if audit.offload:
        lines += wrapped(
            "offloaded: " + ", ".join(f"{name} ({kind})" for name, kind in audit.offload.items()), "", "  "
        )
    for note in audit.notes:
        lines += wrapped(f"note: {note}", "", "  ")
    return "\n".join([*lines, *_misplaced(audit)])


def _misplaced(audit: Audit) -> list[str]:
    if audit.ok:
        return ["nothing is misplaced"]
    wrong = sum(found.tensor.bytes for found in audit.misplaced if found.tensor.device != "meta")
    lines = wrapped(f"misplaced: {_count(len(audit.misplaced), 'tensor')}, {human(wrong)}", "", "  ")
    by_reason: dict[str, list[TensorRecord]] = {}
    for found in audit.misplaced:
        by_reason.setdefault(found.reason, []).append(found.tensor)
    for reason, records in by_reason.items():
        lines += wrapped(reason[:1].upper() + reason[1:] + ":", "  ", "    ")
        lines += [f"    {_shortened(record.path, WIDTH - 4)}" for record in records[:_NAMED]]
        if len(records) > _NAMED:
            lines.append(f"    and {len(records) - _NAMED} more")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]
