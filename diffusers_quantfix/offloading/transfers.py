"""Transfers of diffusers' group offloading that run on their own stream while another group computes.

Nothing may read the copies before the transfer is complete. The host does not wait for that: an event is recorded at
the end of the transfer, before the next group's transfer, and the compute stream waits for it.

The copies of a prefetched group are kept aside, and its parameters keep their data on the offload device until the
group is about to run (`use_prefetched`). Code that reads or changes the parameters before that finds the weights:
``state_dict()``, or loading a LoRA after an exception has ended a forward pass. And if a cache skips the group's layer,
nothing has to be copied back.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``, ``GroupOffloadingHook``).
"""

from __future__ import annotations

import sys

from .inventory import is_onloaded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = [
    "accelerator",
    "compute_stream",
    "end_transfer",
    "expect_prefetch",
    "expect_write",
    "forget",
    "is_expected",
    "is_in_use",
    "is_outdated",
    "is_prefetch",
    "is_waited_for",
    "note_use",
    "use_prefetched",
]

_EXPECTED = "_quantfix_is_prefetch"
_ASIDE = "_quantfix_prefetched"
_EVENT = "_quantfix_transferred"
_IN_USE = "_quantfix_is_in_use"
_OUTDATED = "_quantfix_prefetch_is_outdated"


def accelerator(group: Any) -> Any:
    """``torch.cuda``, or torch's module for another type of device."""
    torch = sys.modules["torch"]
    device = group.onload_device
    return getattr(torch, device.type if type(device) is torch.device else torch.device(device).type)


def compute_stream(group: Any) -> Any:
    return accelerator(group).current_stream(group.onload_device)


def expect_prefetch(group: Any) -> None:
    """Mark the next ``onload_`` of ``group`` as a prefetch, whose copies are kept aside."""
    vars(group)[_EXPECTED] = True


def is_expected(group: Any) -> bool:
    """Whether the next ``onload_`` of ``group`` is a prefetch."""
    return _EXPECTED in vars(group)


def is_prefetch(group: Any) -> bool:
    """Whether this ``onload_`` of ``group`` is the prefetch announced by `expect_prefetch`; clears that mark."""
    return bool(vars(group).pop(_EXPECTED, False))


def end_transfer(group: Any, use: Callable[[], None] | None = None) -> None:
    """Record the end of a transfer: the copies of ``group`` to its device have just been issued on its stream.

    Args:
        group: the ``ModuleGroup``.
        use: for a prefetch, puts the copies into the group, and is called by `use_prefetched`. None lets the compute
            stream wait for the copies now.
    """
    held = vars(group)
    event = None
    held.pop(_OUTDATED, None)
    if group.non_blocking:  # else the host has waited
        # One event for all transfers of a group: creating one takes as long as a small copy.
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
    """Whether `end_transfer` makes the compute stream wait for the transfers of ``group``."""
    return _EVENT in vars(group)


def use_prefetched(group: Any) -> None:
    """Before ``group`` runs: if it was prefetched, put the copies into it."""
    held = vars(group)
    held.pop(_EXPECTED, None)
    aside = held.pop(_ASIDE, None)
    if aside is not None:
        use, event = aside
        if event is not None:
            compute_stream(group).wait_event(event)
        use()


def forget(group: Any) -> bool:
    """Drop the prefetched copies of ``group``; False if there are none.

    No wait is needed: their memory belongs to the stream that copies to it.
    """
    return vars(group).pop(_ASIDE, None) is not None


def expect_write(group: Any) -> None:
    """Before a host copy of ``group`` is written: a prefetch that reads it ends first, and its copies are outdated."""
    if _ASIDE in vars(group):
        group.stream.synchronize()
        vars(group)[_OUTDATED] = True


def is_outdated(group: Any) -> bool:
    """Whether a host copy of ``group`` was written since its prefetch was issued; clears that mark."""
    return bool(vars(group).pop(_OUTDATED, False))


def note_use(group: Any, used: bool) -> None:
    """Record that ``group``, which diffusers moves, was onloaded (``used``) or offloaded."""
    vars(group)[_IN_USE] = used


def is_in_use(group: Any) -> bool:
    """Whether ``group`` itself is on its device; prefetched copies do not count."""
    return is_onloaded(group) or vars(group).get(_IN_USE, False)
