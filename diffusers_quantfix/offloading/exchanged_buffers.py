"""Buffers that were exchanged for other tensors since their group was set up.

A forward pass may put another tensor into a buffer's place for good (a state, a table for longer inputs), and a program
for one pass (``functional_call``, hooks). diffusers' ``ModuleGroup`` lists the buffers that it found at first: the
others stay on the device, or are not moved there.

Each tensor stays what it is, since others may have it: data is never put from one into another.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

import sys
import weakref

from .counters import has_version
from .group_tensors import is_on_disk
from .replaced import forget_copies

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["follow_places", "look_up_places"]

_PLACES = "_quantfix_places_of_buffers"


class _Place:
    """A place of a buffer of a group.

    Attributes:
        buffer: the tensor there that the group moves.
        is_inside: whether it is in one of the group's modules; else the group lists the buffer itself.
        theirs: what the program had put there on the device before the group was onloaded. It stays on the device.
            None while the group is offloaded.
    """

    __slots__ = ("_name", "_names", "buffer", "is_inside", "theirs")

    def __init__(self, names: dict[str, Any], name: str, buffer: Any, is_inside: bool) -> None:
        self._names = names
        self._name = name
        self.buffer = buffer
        self.is_inside = is_inside
        self.theirs: Any = None

    def now(self) -> Any:
        """The tensor that is there now; if there is none, the one before."""
        found = self._names.get(self._name)
        return self.buffer if found is None else found

    def accept(self, buffer: Any) -> None:
        self.buffer = self._names[self._name] = buffer


class _Places:
    """The places of a group's buffers.

    Attributes:
        copies: the group's ``cpu_param_dict`` when they were looked up.
        former: buffers that are no longer in these places. They are moved with the group as long as anybody else has
            them: they may be put back, or be in use under another name.
        is_onloaded: whether the group was onloaded, and not offloaded since.
    """

    __slots__ = ("copies", "former", "is_onloaded", "places")

    def __init__(self, copies: Any, places: list[_Place], former: list[Any]) -> None:
        self.copies = copies
        self.places = places
        self.former = former
        self.is_onloaded = True


def look_up_places(group: Any) -> None:
    """Note the places of the buffers that ``group`` has beside its modules, and of all, if it has host copies."""
    copies = group.cpu_param_dict
    known: _Places | None = vars(group).get(_PLACES)
    if known is not None and known.copies is copies:
        return
    inside = {id(module): module for member in group.modules for module in member.modules()} if copies else {}
    beside = {id(buffer) for buffer in group.buffers}
    around = {id(module): module for module in group.offload_leader.modules()} if beside else {}
    places = [
        _Place(module._buffers, name, buffer, key in inside)
        for key, module in {**inside, **around}.items()
        for name, buffer in module._buffers.items()
        if buffer is not None and (key in inside or id(buffer) in beside)
    ]
    vars(group)[_PLACES] = _Places(copies, places, [] if known is None else known.former)


def follow_places(group: Any, onloading: bool) -> bool:
    """Let ``group`` move the buffers that are in its places now, and those that were there while others have them.

    Args:
        group: a ``ModuleGroup``.
        onloading: whether it is about to be onloaded; else it is about to be offloaded.

    Returns:
        whether it moves others than before.
    """
    known: _Places | None = vars(group).get(_PLACES)
    if known is None or is_on_disk(group):
        return False
    begins = onloading and not known.is_onloaded
    known.is_onloaded = onloading
    exchanged = [place for place in known.places if place.now() is not place.buffer]
    if begins:
        host = sys.modules["torch"].device(group.offload_device).type
        for place in exchanged:
            place.theirs = None if place.now().device.type == host else place.now()
    exchanged = [place for place in exchanged if place.now() is not place.theirs]
    if not onloading:
        for place in known.places:
            place.theirs = None
    if exchanged:
        _exchange(group, known, exchanged)
    if begins and known.former:
        _forget_unused(group, known)
    elif not exchanged:
        return False
    forget_copies(group)
    return True


def _exchange(group: Any, known: _Places, exchanged: list[_Place]) -> None:
    copies = group.cpu_param_dict
    before = {id(buffer): buffer for buffer in (*known.former, *(place.buffer for place in known.places))}
    others = [buffer for buffer in group.buffers if id(buffer) not in before]
    former = {id(buffer): buffer for buffer in (*known.former, *(place.buffer for place in exchanged))}
    new = {place: _normal(place.now()) for place in exchanged}
    for buffer in new.values() if copies else ():
        if id(buffer) not in before:
            copies[buffer] = _copy(buffer, group.offload_device)
    beside = {}
    for place in known.places:
        buffer = new.get(place, place.buffer)
        former.pop(id(buffer), None)
        if not place.is_inside:
            beside[id(buffer)] = buffer
    known.former = list(former.values())
    group.buffers[:] = [*others, *{**beside, **former}.values()]
    # Last, so that what was interrupted before is done again.
    for place, buffer in new.items():
        place.accept(buffer)


def _forget_unused(group: Any, known: _Places) -> None:
    """Forget the former buffers that nobody else has."""
    copies = group.cpu_param_dict
    numbers, references = set(map(id, known.former)), list(map(weakref.ref, known.former))
    hosts: list[Any] = [None] * len(references)
    try:
        hosts = [copies.pop(buffer, None) for buffer in known.former]
        known.former.clear()
        group.buffers[:] = [buffer for buffer in group.buffers if id(buffer) not in numbers]
    finally:
        alive = [
            (buffer, host)
            for one, host in zip(references, hosts, strict=True)
            if (buffer := one()) is not None
        ]
        known.former[:] = [buffer for buffer, _ in alive]
        group.buffers += known.former
        copies.update({buffer: host for buffer, host in alive if host is not None})


def _normal(buffer: Any) -> Any:
    """``buffer``, or for one made in inference mode a tensor with the same data that can be moved outside of it."""
    torch = sys.modules["torch"]
    if type(buffer) is not torch.Tensor or has_version(buffer):
        return buffer
    with torch.inference_mode(False):
        normal = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    normal.data = buffer
    return normal


def _copy(buffer: Any, device: Any) -> Any:
    with sys.modules["torch"].inference_mode(buffer.is_inference()):
        return buffer.data.to(device)
