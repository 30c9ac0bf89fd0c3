"""Looking at tensors without the program's modes: they belong to the program's operations, not to ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..engine.target import finished

__all__ = ["unobserved"]


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """In this thread, the program's function and dispatch modes do not see what is done; nor do tensor subclasses.

    A mode may count or record what it sees, change the result (a default device, ``FakeTensorMode``) or raise.
    """
    torch: Any = finished("torch")
    if torch is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack():
            from torch.utils._python_dispatch import _disable_current_modes

            stack.enter_context(_disable_current_modes())
        yield
