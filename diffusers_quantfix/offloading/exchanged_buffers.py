"""Buffers that were exchanged for other tensors inside the layers of a group that has host copies.

A forward pass may put another tensor into a buffer's place (a state, a table for longer inputs), and a program may do
so for one pass (``functional_call``, hooks). diffusers' ``ModuleGroup`` on a stream knows the buffers that it copied to
the host at first.

Here what a layer holds gets its host copy when the group is onloaded next. Until then it stays where it is, as upstream
leaves it; beside the layers always. There the pass may still read it when its module has ended, and the program between
two passes.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

import sys

from .counters import has_version
from .own_objects import is_plain, normal
from .replaced import forget_copies

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["admit_buffers", "has_exchanged", "lacks_buffers", "look_up_places"]

_PLACES = "_quantfix_places_of_buffers"


class _Place:
    """A place of a buffer in a group's modules.

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


def look_up_places(group: Any) -> None:
    """Note the places of the buffers in the modules of ``group``, which has host copies, if these are others now."""
    copies, known = group.cpu_param_dict, vars(group).get(_PLACES)
    if known is None or known[0] is not copies:
        modules = {id(module): module for member in group.modules for module in member.modules()}
        places = [
            _Place(module._buffers, name, buffer)
            for module in modules.values()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        vars(group)[_PLACES] = copies, places


def has_exchanged(group: Any) -> bool:
    """Whether a place has another tensor than when the places of ``group`` were looked up."""
    for place in vars(group).get(_PLACES, ((), ()))[1]:  # noqa: SIM110  # a generator takes longer
        if place.names.get(place.name) is not place.first:
            return True
    return False


def admit_buffers(group: Any) -> None:
    """Before ``group`` is onloaded: give it a host copy of what came into the places of its buffers."""
    places: list[_Place] = vars(group)[_PLACES][1]
    known, inference_mode = group.cpu_param_dict, sys.modules["torch"].is_inference_mode_enabled()
    # By the identity of a tensor, which is kept alive: shared ones stay shared.
    new: dict[int, tuple[Any, Any]] = {}
    for place in places:
        buffer = place.names.get(place.name)
        if buffer is place.first or buffer is None or buffer in known or not is_plain(buffer):
            continue
        if id(buffer) not in new:
            # One made in inference mode cannot be moved outside of it.
            new[id(buffer)] = buffer, buffer if inference_mode or has_version(buffer) else normal(buffer)
        place.names[place.name] = new[id(buffer)][1]
    if not new:
        return
    here = {id(place.names.get(place.name)) for place in places} | set(map(id, group.buffers))
    gone = {id(place.first) for place in places} - here
    copies = {tensor: copy for tensor, copy in known.items() if id(tensor) not in gone}
    # Another dictionary: others tell it from the one before.
    group.cpu_param_dict = copies | {
        buffer: _copy(buffer, group.offload_device) for _, buffer in new.values()
    }
    forget_copies(group)


def lacks_buffers(group: Any) -> bool:
    """Whether a tensor on the host has come into a place of ``group`` since its copies to the device were issued."""
    if not has_exchanged(group):
        return False
    device = sys.modules["torch"].device(group.offload_device).type
    here = (place.names.get(place.name) for place in vars(group)[_PLACES][1])
    copied = group.cpu_param_dict
    return any(
        buffer is not None and buffer.device.type == device and buffer not in copied for buffer in here
    )


def _copy(buffer: Any, device: Any) -> Any:
    with sys.modules["torch"].inference_mode(buffer.is_inference()):
        return buffer.data.to(device)
