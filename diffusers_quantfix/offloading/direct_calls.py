"""Layers that are called while the group they belong to is offloaded: the group is onloaded for the call.

`DirectCall` is for a child of a group-offloaded model. It is both a pair of torch's hooks, for calls of the child, and
a hook like diffusers' own, for `called.as_called`.

Upstream: diffusers/hooks/group_offloading.py (``GroupOffloadingHook``, ``ModuleGroup``).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["DirectCall", "forget_direct_call"]

_ONLOADED_FOR = "_quantfix_onloaded_for"
_BEING_ONLOADED = object()  # no call was entered: an interrupted onload is done again


class DirectCall:
    """The hooks of one child of the module that ``hook``, a ``GroupOffloadingHook``, belongs to.

    Parameters:
        hook: its group holds the child.
        within: for a layer of a child: the child. Where that runs, the layer is onloaded with it.
    """

    def __init__(self, hook: Any, within: Any = None) -> None:
        self._hook = hook
        self._within = within

    def pre_forward(self, child: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.onload(child, args, kwargs) or (args, kwargs)

    def post_forward(self, child: Any, output: Any) -> Any:
        self.offload(child, (), output)
        return output

    def onload(self, child: Any, args: Any, kwargs: Any) -> Any:
        """Before ``child`` runs: onload its group, if it is offloaded, and move its inputs along."""
        group = self._hook.group
        held = vars(group)
        caller = held.get(_ONLOADED_FOR)
        if (caller is None or caller is self._within) and _is_there(child, group):
            return None
        held[_ONLOADED_FOR] = _BEING_ONLOADED
        group.onload_()
        held[_ONLOADED_FOR] = child
        send = sys.modules["diffusers.hooks.group_offloading"].send_to_device
        return send(args, group.onload_device), send(kwargs, group.onload_device)

    def offload(self, child: Any, args: Any, output: Any) -> None:
        """After ``child`` has run: offload its group, if it was onloaded for it."""
        held = vars(self._hook.group)
        if held.get(_ONLOADED_FOR) is child:
            self._hook.group.offload_()
            del held[_ONLOADED_FOR]  # last: if interrupted here, the group is offloaded after the next call

    def register(self, child: Any) -> list[Any]:
        """Give ``child`` the hooks.

        Returns:
            their handles.
        """
        return [
            child.register_forward_pre_hook(self.onload, with_kwargs=True),
            child.register_forward_hook(self.offload),
        ]


def forget_direct_call(group: Any) -> None:
    """Before the model itself runs: a child call that was interrupted is over."""
    vars(group).pop(_ONLOADED_FOR, None)


def _is_there(child: Any, group: Any) -> bool:
    for tensors in (child.parameters(), child.buffers()):
        for tensor in tensors:
            device = tensor.device
            return bool(
                device.type != _type_of(group.offload_device) or device.type == _type_of(group.onload_device)
            )
    return True


def _type_of(device: Any) -> str:
    return str(getattr(device, "type", device)).partition(":")[0]
