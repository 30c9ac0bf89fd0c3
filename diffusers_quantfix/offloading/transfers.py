"""Transfers of diffusers' group offloading that run on a stream of their own while another group computes.

Until such a transfer is done, nothing may read what it copies. The host does not wait for that: an event is recorded at
the end of the transfer, before the one of the next group, and the compute stream waits for it.

The copies of a group that is prefetched are kept apart, and its parameters remain what they are on the offload device,
until the group is about to run (`take_up`). Whoever reads or changes the parameters before that finds the weights:
``state_dict()``, a LoRA that is loaded after an exception has stopped a pass. And a group whose layer a cache skips has
nothing to take back.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``, ``GroupOffloadingHook``).
"""

from __future__ import annotations

import sys

from .inventory import is_brought

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = [
    "accelerator",
    "compute_stream",
    "end_transfer",
    "expect_prefetch",
    "forget",
    "is_in_use",
    "is_prefetch",
    "is_waited_for",
    "note_use",
    "send_back",
    "take_up",
]

_EXPECTED = "_quantfix_is_prefetch"
_ASIDE = "_quantfix_prefetched"
_EVENT = "_quantfix_transferred"
_IN_USE = "_quantfix_is_in_use"


def accelerator(group: Any) -> Any:
    """``torch.cuda``, or what there is for another kind of device."""
    torch = sys.modules["torch"]
    device = group.onload_device
    return getattr(torch, device.type if type(device) is torch.device else torch.device(device).type)


def compute_stream(group: Any) -> Any:
    return accelerator(group).current_stream(group.onload_device)


def expect_prefetch(group: Any) -> None:
    """The next ``onload_`` of ``group`` runs ahead of its layer: its copies are to be kept apart."""
    vars(group)[_EXPECTED] = True


def is_prefetch(group: Any) -> bool:
    """Whether this ``onload_`` of ``group`` is the one that was expected; True once."""
    return bool(vars(group).pop(_EXPECTED, False))


def end_transfer(group: Any, use: Callable[[], None] | None = None) -> None:
    """The copies to the device of ``group`` have just been issued on its stream.

    Args:
        use: of a prefetch: puts the copies in the places of the group. They are kept apart with it; without it the
            compute stream waits for them now.
    """
    held = vars(group)
    event = None
    if group.non_blocking:  # else the host has waited
        # One event for all transfers of a group: to make one takes as long as a small copy.
        event = held.get(_EVENT)
        if event is None:
            event = held[_EVENT] = group.stream.record_event()
        else:
            group.stream.record_event(event)
    if use is not None:
        held[_ASIDE] = use, event
    elif event is not None:
        compute_stream(group).wait_event(event)


def is_waited_for(group: Any) -> bool:
    """Whether the compute stream waits for the transfers of ``group`` as `end_transfer` lets it."""
    return _EVENT in vars(group)


def take_up(group: Any) -> None:
    """Before ``group`` runs: put its copies, if it was prefetched, in its places."""
    held = vars(group)
    held.pop(_EXPECTED, None)
    aside = held.pop(_ASIDE, None)
    if aside is not None:
        use, event = aside
        if event is not None:
            compute_stream(group).wait_event(event)
        use()


def forget(group: Any) -> bool:
    """Drop the copies that were prefetched for ``group``; False if there are none.

    Nobody has to wait: their memory belongs to the stream that copies to it.
    """
    return vars(group).pop(_ASIDE, None) is not None


def note_use(group: Any, used: bool) -> None:
    """``group``, which diffusers moves, has come to its device, or has gone back."""
    vars(group)[_IN_USE] = used


def is_in_use(group: Any) -> bool:
    """Whether the tensors of ``group`` are on its device, not those of a prefetch."""
    return is_brought(group) or vars(group).get(_IN_USE, False)


def send_back(group: Any) -> None:
    """Offload ``group``, which was prefetched for a layer that does not run."""
    if not forget(group) or is_in_use(group):
        group.offload_()
