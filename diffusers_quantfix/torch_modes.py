"""Setting aside the thread's modes and its tracing, which belong to the program's operations, not to ours.

Neither torch nor another library is imported here at module level.

Upstream: torch/overrides.py (``TorchFunctionMode``), torch/utils/_python_dispatch.py (``TorchDispatchMode``).
"""

from __future__ import annotations

import contextlib
import functools
import sys

from .engine.target import finished as imported
from .finishing import finished

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

__all__ = ["unobserved", "without_dispatch_modes", "without_function_modes", "without_tracing"]


def unobserved(function: Callable[P, T]) -> Callable[P, T]:
    """While ``function`` runs, the program's modes do not see what it does in this thread; nor do tensor subclasses.

    A mode may count or record what it sees, change the result (a default device, ``FakeTensorMode``) or raise. torch
    crashes at the end of a ``torch.jit.trace`` in which an error of the size of a tensor was expected.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        torch: Any = imported("torch")
        if torch is None:
            return function(*args, **kwargs)
        # In C, and not in an `ExitStack`: Ctrl-C does not come between its effect and the block.
        with torch._C.DisableTorchFunction(), without_dispatch_modes(torch), without_tracing(torch):
            return function(*args, **kwargs)

    return call


def without_function_modes() -> contextlib.AbstractContextManager[None]:
    """A block without function modes, such as a default device."""
    overrides: Any = sys.modules["torch.overrides"]
    # Even if there are none: at the end it removes a mode of ours that Ctrl-C has left.
    return _aside(overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode)


def without_tracing(torch: Any) -> contextlib.AbstractContextManager[None]:
    """A block outside of ``torch.jit.trace`` and the older ``torch.onnx.export``, which record what this thread
    computes."""
    state = torch._C._get_tracing_state()
    return contextlib.nullcontext() if state is None else _without(torch, state)


@contextlib.contextmanager
def _without(torch: Any, state: Any) -> Iterator[None]:
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)


def without_dispatch_modes(torch: Any) -> contextlib.AbstractContextManager[Any]:
    """A block without dispatch modes, such as ``FakeTensorMode``."""
    if not torch._C._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    dispatch: Any = sys.modules["torch.utils._python_dispatch"]
    if sys.modules[
        "torch._ops"
    ]._len_torch_dispatch_stack_pre_dispatch():  # a stack of its own, while torch exports
        disabled: contextlib.AbstractContextManager[Any] = dispatch._disable_current_modes()
        return disabled
    return _aside(dispatch._get_current_dispatch_mode_stack, dispatch._pop_mode, dispatch._push_mode)


@contextlib.contextmanager
def _aside(
    stack: Callable[[], list[Any]], pop: Callable[[], Any], push: Callable[[Any], None]
) -> Iterator[None]:
    theirs = stack()

    def put_back() -> None:
        now = stack()
        while len(now) > len(theirs) or any(map(lambda one, other: one is not other, now, theirs)):
            pop()
            now = stack()
        for mode in theirs[len(now) :]:
            push(mode)

    with finished(lambda: [put_back]):
        for _ in theirs:
            pop()
        yield
