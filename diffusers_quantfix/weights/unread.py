"""A tensor that raises on use: for a probe that must stop there, since the library would then import its kernels."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Used(Exception):
    """The device of an `unread` tensor was asked for."""


def unread(tensor: Any) -> Any:
    """``tensor`` as a subclass whose ``device`` raises `Used`; everything else works."""
    import torch

    class Unread(torch.Tensor):  # type: ignore[misc]  # torch's types are skipped
        @property
        def device(self) -> Any:
            raise Used

    return tensor.as_subclass(Unread)
