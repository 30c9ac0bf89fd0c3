"""A value of one thread or task that a pickled function may refer to.

cloudpickle and dill pickle a method of a class with all the globals that its code names. A ``ContextVar`` there cannot
be pickled, and what upstream's method could be sent to, ours could not.
"""

from __future__ import annotations

from contextvars import ContextVar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextvars import Token
    from typing import Any

__all__ = ["TaskValue"]


class TaskValue:
    """A ``ContextVar`` that is pickled as the global that it is.

    Args:
        module: the ``__name__`` of the module that has it as a global.
        name: the name of that global.
        default: the value where none is set.
    """

    def __init__(self, module: str, name: str, default: Any = None) -> None:
        self.__module__ = module
        self._name = name
        self._variable: ContextVar[Any] = ContextVar(f"{module}.{name}", default=default)

    def get(self) -> Any:
        return self._variable.get()

    def set(self, value: Any) -> Token[Any]:
        return self._variable.set(value)

    def reset(self, token: Token[Any]) -> None:
        self._variable.reset(token)

    def __reduce__(self) -> str:
        return self._name
