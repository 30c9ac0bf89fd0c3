"""Buffers that were exchanged for other tensors since their group was set up.

A forward pass may put another tensor into a buffer's place (a state, a table for longer inputs), and a program may do
so for one pass (``functional_call``, hooks). diffusers' ``ModuleGroup`` lists the buffers that it found at first: the
others stay on the device.

Here a tensor that came in goes to the host with its group where nobody else has it, and comes back. Where others have
it (it was returned, or belongs to a list of states, a view or a graph) it stays what it is, where it is, as upstream
leaves it. Data is never put from one tensor into another.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

import sys
import weakref

from .group_tensors import is_on_disk
from .own_objects import is_plain, normal, own_object
from .replaced import forget_copies

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "admit_buffers",
    "dismiss_buffers",
    "has_exchanged",
    "lacks_buffers",
    "look_up_places",
    "take_buffers",
]

_PLACES = "_quantfix_places_of_buffers"


class _Place:
    """A place of a buffer of a group.

    Attributes:
        names: the ``_buffers`` of its module.
        name: of the buffer.
        first: the tensor that was there when the places were looked up.
    """

    __slots__ = ("first", "name", "names")

    def __init__(self, names: dict[str, Any], name: str, first: Any) -> None:
        self.names = names
        self.name = name
        self.first = first


class _Places:
    """The places of a group's buffers.

    Attributes:
        copies: the group's ``cpu_param_dict`` when they were looked up.
        beside: those of the buffers that the group lists itself.
        inside: those in the group's modules, if it has host copies.
        guests: the tensors that are moved with the group in this pass, beside the buffers that it lists.
    """

    __slots__ = ("beside", "copies", "guests", "inside")

    def __init__(self, copies: Any, beside: list[_Place], inside: list[_Place], guests: list[Any]) -> None:
        self.copies = copies
        self.beside = beside
        self.inside = inside
        self.guests = guests


def look_up_places(group: Any) -> None:
    """Note the places of the buffers that ``group`` has beside its modules, and of all, if it has host copies."""
    copies = group.cpu_param_dict
    known: _Places | None = vars(group).get(_PLACES)
    if known is not None and known.copies is copies:
        return
    inside = {id(module): module for member in group.modules for module in member.modules()} if copies else {}
    guests = [] if known is None else known.guests
    listed = set(map(id, group.buffers)) - set(map(id, guests))
    around = group.offload_leader.modules() if listed and known is None else ()
    vars(group)[_PLACES] = _Places(
        copies,
        [place for module in around for place in _places_in(module) if id(place.first) in listed]
        if known is None
        else known.beside,
        [place for module in inside.values() for place in _places_in(module)],
        guests,
    )


def _places_in(module: Any) -> list[_Place]:
    return [
        _Place(module._buffers, name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def has_exchanged(group: Any) -> bool:
    """Whether a place of ``group`` has another buffer than at first, or the group moves any that it does not list."""
    known: _Places | None = vars(group).get(_PLACES)
    if known is None:
        return False
    if known.guests:
        return True
    for place in known.beside:
        if place.names.get(place.name) is not place.first:
            return True
    for place in known.inside:  # noqa: SIM110  # a generator takes longer
        if place.names.get(place.name) is not place.first:
            return True
    return False


def lacks_buffers(group: Any) -> bool:
    """Whether a buffer on the host is in a place of ``group``, whose copies are on the device, and not among these."""
    return has_exchanged(group) and bool(_on_the_host(group, vars(group)[_PLACES]))


def admit_buffers(group: Any) -> bool:
    """Before ``group`` is onloaded: let it move the tensors on the host that were put into its places.

    Returns:
        whether there are any.
    """
    known: _Places | None = vars(group).get(_PLACES)
    if known is None or is_on_disk(group):
        return False
    return _join(group, known, _on_the_host(group, known))


def _on_the_host(group: Any, known: _Places) -> list[Any]:
    listed: set[int] | None = None
    found = {}
    for place in known.beside:
        buffer = place.names.get(place.name)
        if buffer is place.first or buffer is None or not _is_on(buffer, group.offload_device):
            continue
        if listed is None:
            listed = set(map(id, group.buffers))
        if id(buffer) not in listed and is_plain(buffer):
            found[id(buffer)] = buffer
    return list(found.values())


def take_buffers(group: Any) -> None:
    """Before ``group`` is offloaded: let it move the tensors in its places that nobody else has."""
    known: _Places | None = vars(group).get(_PLACES)
    if known is None or is_on_disk(group):
        return
    listed: set[int] | None = None
    taken = []
    for place in known.beside:
        if place.names.get(place.name) is not place.first:
            if listed is None:
                listed = set(map(id, group.buffers))
            if id(place.names.get(place.name)) not in listed and (buffer := _taken(group, place)) is not None:
                taken.append(buffer)
    # By the identity of a tensor, which is kept alive: shared ones stay shared.
    renewed: dict[int, tuple[Any, Any]] = {}
    for place in known.inside:
        if place.names.get(place.name) is not place.first:
            _renew(group, place, renewed)
    if renewed:
        forget_copies(group)
    _join(group, known, taken)


def _join(group: Any, known: _Places, buffers: list[Any]) -> bool:
    """Let ``group`` move ``buffers`` until they are dismissed."""
    if not buffers:
        return False
    known.guests += buffers
    if group.cpu_param_dict:
        copies = {buffer: _copy(buffer, group.offload_device) for buffer in buffers}
        _set_copies(group, known, group.cpu_param_dict | copies)
    group.buffers += buffers
    return True


def dismiss_buffers(group: Any) -> None:
    """Let ``group`` no longer move what it does not list itself."""
    known: _Places | None = vars(group).get(_PLACES)
    if known is None or not known.guests:
        return
    numbers = set(map(id, known.guests))
    group.buffers[:] = [buffer for buffer in group.buffers if id(buffer) not in numbers]
    if group.cpu_param_dict:
        copies = group.cpu_param_dict
        _set_copies(group, known, {buffer: copies[buffer] for buffer in copies if id(buffer) not in numbers})
    known.guests = []


def _set_copies(group: Any, known: _Places, copies: dict[Any, Any]) -> None:
    """Give ``group`` another dictionary, which others can tell from the one before; the places stay what they are."""
    if known.copies is group.cpu_param_dict:
        known.copies = copies
    group.cpu_param_dict = copies
    forget_copies(group)


def _taken(group: Any, place: _Place) -> Any:
    """The tensor in a place, as an object of its own, if nobody else has that or its memory; else None."""
    buffer = place.names.get(place.name)
    if buffer is None or not _is_on(buffer, group.onload_device) or not is_plain(buffer):
        return None
    alias = place.names[place.name] = buffer.data
    reference = weakref.ref(buffer)
    del buffer
    buffer = reference()
    if buffer is not None:
        place.names[place.name] = buffer
        return None
    memory = alias.untyped_storage()
    # One use is the alias, one the object that is asked.
    if sys.modules["torch"]._C._storage_Use_Count(memory._cdata) > 2:
        return None
    place.names[place.name] = alias = normal(alias)
    return alias


def _renew(group: Any, place: _Place, renewed: dict[int, tuple[Any, Any]]) -> None:
    """Let ``group`` offload what is in the place of one of its modules' buffers now, without touching that tensor."""
    copies = group.cpu_param_dict
    buffer = place.names.get(place.name)
    if buffer is None or buffer in copies or not is_plain(buffer):
        return
    if id(buffer) not in renewed:
        renewed[id(buffer)] = buffer, own_object(buffer)
    copies.pop(place.first, None)
    place.first = place.names[place.name] = renewed[id(buffer)][1]
    copies[place.first] = _copy(place.first, group.offload_device)


def _is_on(buffer: Any, device: Any) -> bool:
    """Whether ``buffer`` is on a device of that type."""
    return bool(buffer.device.type == sys.modules["torch"].device(device).type)


def _copy(buffer: Any, device: Any) -> Any:
    with sys.modules["torch"].inference_mode(buffer.is_inference()):
        return buffer.data.to(device)
