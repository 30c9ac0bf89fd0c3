"""Wrapt's function wrapper, but pickled and copied by reference, as functions are.

Wrapt is imported only when the first fix wraps something: it imports asyncio, and few processes need it.
"""

from __future__ import annotations

import functools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType
    from typing import Any

__all__ = ["wrapped"]


def wrapped(
    function: FunctionType, wrapper: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
) -> Any:
    """``function`` wrapped by ``wrapper``; arguments are positional because wrapt 2.0 renamed one of them."""
    return _class()(function, wrapper)


@functools.cache
def _class() -> Any:
    import wrapt

    class LoadingWrapper(wrapt.FunctionWrapper):  # type: ignore[misc]  # its types are skipped
        """A wrapper that pickle finds by the function's names, which it shares; a copy of it is itself."""

        def __reduce__(self) -> str:
            return str(self.__qualname__)

        def __reduce_ex__(self, protocol: Any) -> str:
            return str(self.__qualname__)

        def __repr__(self) -> str:
            return repr(self.__wrapped__)

        def __copy__(self) -> Any:
            return self

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    return LoadingWrapper
