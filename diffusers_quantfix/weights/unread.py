"""Whether a library comes to use a tensor: for a probe that must not let it, since it would then import its kernels."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Used(Exception):
    """The device of an `unread` tensor was asked for."""


def unread(tensor: Any) -> Any:
    """``tensor`` with everything that can be said of it, but for its device: that raises `Used`."""
    import torch

    class Unread(torch.Tensor):  # type: ignore[misc]  # torch's types are skipped
        @property
        def device(self) -> Any:
            raise Used

    return tensor.as_subclass(Unread)
