"""How a parameter of a subclass is pickled: created without its constructor, which may need arguments.

torch's own functions do it, so the file needs the class and torch, not this package.

Upstream: torch/_tensor.py (``_rebuild_from_type_v2``), torch/_utils.py (``_rebuild_parameter``, ``_set_obj_state``).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["of_the_user", "rebuilt", "with_others"]


def rebuilt(parameter: Any, data: Any, state: Any, before: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` returns for ``parameter``: its class, its attributes, and a ``__setstate__`` of its class.

    Args:
        parameter: of any subclass of ``torch.nn.Parameter``.
        data: its data as a plain tensor.
        state: what ``torch._utils._get_obj_state`` says, by the ``__getstate__`` of the class.
        before: attributes that it has before ``__setstate__`` of its class, which may leave them out or change them.
    """
    torch = sys.modules["torch"]
    cls = type(parameter)
    if before:
        # `as_subclass` would make another object, without them.
        empty = _Reduced((torch.Tensor._make_subclass, (cls, data, parameter.requires_grad)))
        return torch._tensor._rebuild_from_type_v2, (torch._utils._set_obj_state, cls, (empty, before), state)
    # `as_subclass`, by which a plain parameter gets its class, would be an operation in the graph.
    create, arguments = (
        (torch.Tensor._make_subclass, (cls, data, True))
        if parameter.requires_grad
        else (torch._utils._rebuild_parameter, (data, False, OrderedDict()))
    )
    return torch._tensor._rebuild_from_type_v2, (create, cls, arguments, state)


def with_others(reduced: tuple[Any, ...], others: dict[str, Any]) -> tuple[Any, ...]:
    """The same as ``reduced``, and then the attributes ``others``, which the class's ``__setstate__`` leaves out."""
    return sys.modules["torch"]._utils._set_obj_state, (_Reduced(reduced), others)


def of_the_user(parameter: Any, state: Any, known: Collection[str]) -> dict[str, Any]:
    """The attributes that a user gave ``parameter``, as far as the ``__getstate__`` of its class passes them on as they
    are.

    Args:
        parameter: of a class with a ``__setstate__`` of its own.
        state: what its ``__getstate__`` returned.
        known: the attributes that the library knows.
    """
    if not isinstance(state, dict):
        return {}
    own = vars(parameter)
    return {
        name: value
        for name, value in state.items()
        if name not in known and name in own and own[name] is value
    }


class _Reduced:
    """Is pickled as what ``reduced`` makes."""

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self._reduced = reduced

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self._reduced
