"""The result of `release`: freed bytes, components kept for others, memory that was not freed, and its holders."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..text import human, sums, wrapped

__all__ = ["Bystander", "Kept", "Release", "Survivor"]

_MOST = 10
_OF_AN_ERROR = (
    "the traceback of an error keeps the variables of the functions that it went through: end the `except` block, or "
    "`del` the error; at a prompt or in a notebook `sys.last_value = sys.last_traceback = sys.last_exc = None`"
)


@dataclass(frozen=True)
class Kept:
    """A component that was not released, because others use it.

    Attributes:
        component: its name in the released object.
        type: its class.
        users: the other live pipelines that use it, e.g. "FluxImg2ImgPipeline.vae".
        bytes: device -> bytes that it still holds.
    """

    component: str
    type: str
    users: tuple[str, ...]
    bytes: dict[str, int]


@dataclass(frozen=True)
class Survivor:
    """Memory of a released component that was not freed, because something else holds a tensor in it.

    Attributes:
        path: the tensor's dotted name, with the component.
        device: e.g. "cuda:0".
        bytes: the size of its storage.
        reason: why it was not freed, in words.
        holders: chains of references, from the tensor up to a variable.
    """

    path: str
    device: str
    bytes: int
    reason: str
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Bystander:
    """Another tensor on the same devices, not part of a released object (an output, an activation)."""

    dtype: str
    shape: tuple[int, ...]
    device: str
    bytes: int
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Release:
    """The result of `release`. It prints as a short text and holds no tensors.

    Attributes:
        released: names of the components emptied by this call.
        freed: device -> bytes freed by this call ("cpu" included, "meta" has none).
        kept: components that others use.
        survivors: memory of the released components that something else still holds, the largest first.
        bystanders: the largest other tensors on the released components' devices (with ``verify``).
        allocated: accelerator device -> bytes allocated (before, after), as torch counts them.
        already: names of targets and components that were released before.
        constants: tensors that were not freed, since a library shares them between all models -> the owner (some kB).
    """

    released: tuple[str, ...] = ()
    freed: dict[str, int] | None = None
    kept: tuple[Kept, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    bystanders: tuple[Bystander, ...] = ()
    allocated: dict[str, tuple[int, int]] | None = None
    already: tuple[str, ...] = ()
    constants: dict[str, str] | None = None

    @property
    def ok(self) -> bool:
        """Whether everything was freed: no survivors (kept components do not count)."""
        return not self.survivors

    def to_dict(self) -> dict[str, Any]:
        """The result in JSON types."""
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        lines = []
        for owner, names in _by_owner(self.released).items():
            lines += wrapped(f"released {owner}" + (f": {', '.join(names)}" if names else ""), "", "  ")
        lines = lines or ["nothing released"]
        freed = [f"{human(count)} on {device}" for device, count in (self.freed or {}).items()]
        if freed:
            lines += wrapped(f"freed: {', '.join(freed)}", "  ", "    ")
        for device, (before, after) in (self.allocated or {}).items():
            if before or after:
                lines.append(f"  {device}: {human(before)} -> {human(after)} allocated")
        for name in self.already:
            lines += wrapped(f"{name} had already been released", "  ", "    ")
        for kept in self.kept:
            users = ", ".join(kept.users)
            lines += wrapped(
                f"kept: {kept.component} ({kept.type}), {sums(kept.bytes)}, used by {users}", "  ", "    "
            )
        for survivor in self.survivors[:_MOST]:
            about = (
                f"survivor: {survivor.path}, {human(survivor.bytes)} on {survivor.device}: {survivor.reason}"
            )
            lines += wrapped(about, "  ", "    ") + _chains(survivor.holders)
        if len(self.survivors) > _MOST:
            rest = sum(survivor.bytes for survivor in self.survivors[_MOST:])
            lines.append(f"  and {len(self.survivors) - _MOST} more survivors, {human(rest)}")
        for path, owner in (self.constants or {}).items():
            lines += wrapped(f"not freed: {path} is {owner}", "  ", "    ")
        if self.bystanders:
            lines.append("  other tensors on these devices:")
        for other in self.bystanders:
            about = f"{other.dtype} {list(other.shape)}, {human(other.bytes)} on {other.device}"
            lines += [f"    {about}", *_chains(other.holders)]
        held = [one.holders for one in self.survivors] + [one.holders for one in self.bystanders]
        chains = [chain for found in held for chain in found]
        if any("the traceback of a " in chain for chain in chains):
            lines += wrapped(_OF_AN_ERROR, "  ", "    ")
        return "\n".join(lines)

    __repr__ = __str__


def _by_owner(labels: tuple[str, ...]) -> dict[str, list[str]]:
    """Owner -> component names, from labels ("vae of FluxPipeline"); a model by itself has no names."""
    owners: dict[str, list[str]] = {}
    for label in labels:
        name, _, owner = label.rpartition(" of ")
        if name:
            owners.setdefault(owner, []).append(name)
        else:
            owners.setdefault(label, [])
    return owners


def _chains(holders: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for chain in holders:
        lines += wrapped(f"held by {chain}", "      ", "        ")
    return lines
