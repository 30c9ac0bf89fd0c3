"""An audit as a table of at most 80 columns."""

from __future__ import annotations

import textwrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .auditing import Audit, TensorRecord

__all__ = ["WIDTH", "audit_table", "human"]

WIDTH = 80
_NAMED = 5  # so many misplaced tensors are named, the others are counted


def human(count: int) -> str:
    """Bytes for people: ``1.2 GB`` (powers of 1000, as the makers of GPUs count)."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def audit_table(audit: Audit) -> str:
    """One line per component, device, kind and dtype; the sums; what is misplaced, and why."""
    present = [name for name, kind in audit.components.items() if kind != "None"]
    lines = _wrapped(f"{audit.subject}: {_count(len(audit.tensors), 'tensor')}, {_sums(audit)}")
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
        lines += _wrapped(f"not there: {', '.join(absent)}")
    if audit.offload:
        lines += _wrapped(
            "offloaded: " + ", ".join(f"{name} ({kind})" for name, kind in audit.offload.items())
        )
    for note in audit.notes:
        lines += _wrapped(f"note: {note}")
    return "\n".join([*lines, *_misplaced(audit)])


def _misplaced(audit: Audit) -> list[str]:
    if audit.ok:
        return ["nothing is misplaced"]
    wrong = sum(found.tensor.bytes for found in audit.misplaced if found.tensor.device != "meta")
    lines = _wrapped(f"misplaced: {_count(len(audit.misplaced), 'tensor')}, {human(wrong)}")
    by_reason: dict[str, list[TensorRecord]] = {}
    for found in audit.misplaced:
        by_reason.setdefault(found.reason, []).append(found.tensor)
    for reason, records in by_reason.items():
        lines += _wrapped(reason[:1].upper() + reason[1:] + ":", "  ")
        lines += [f"    {_shortened(record.path, WIDTH - 4)}" for record in records[:_NAMED]]
        if len(records) > _NAMED:
            lines.append(f"    and {len(records) - _NAMED} more")
    return lines


def _sums(audit: Audit) -> str:
    return ", ".join(f"{human(count)} on {device}" for device, count in audit.bytes.items()) or "no memory"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
