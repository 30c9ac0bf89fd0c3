"""Wrapt's wrapper of a function, pickled and copied by reference, as functions are.

Wrapt is imported when the first fix wraps something: it imports asyncio, and few processes need it.
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
    """``function`` as ``wrapper`` calls it; positional arguments, since wrapt 2.0 renamed one of them."""
    return _class()(function, wrapper)


@functools.cache
def _class() -> Any:
    import wrapt

    class LoadingWrapper(wrapt.FunctionWrapper):  # type: ignore[misc]  # its types are skipped
        """A wrapper that pickle finds by the names of the function, which are its own; copies are itself."""

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
