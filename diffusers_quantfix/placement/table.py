"""An audit as a table of at most 80 columns."""

from __future__ import annotations

from ..text import WIDTH, human, sums, wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .auditing import Audit, TensorRecord

__all__ = ["audit_table"]

_NAMED = 5  # so many misplaced tensors are named, the others are counted


def audit_table(audit: Audit) -> str:
    """One line per component, device, kind and dtype; the sums; what is misplaced, and why."""
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
        lines += wrapped(f"not there: {', '.join(absent)}", "", "  ")
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
