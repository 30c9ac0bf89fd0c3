"""The device of the cases that need a GPU."""

from __future__ import annotations

from ..case import NeedsDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def cuda(why: str = "") -> Any:
    """The current CUDA device, with its index.

    Args:
        why: what needs it, for the error.

    Raises:
        NeedsDevice: there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise NeedsDevice(f"needs a CUDA device{why and f': {why}'}")
    return torch.device("cuda", torch.cuda.current_device())
