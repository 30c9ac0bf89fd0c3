"""Pickling of a parameter of a subclass: it is rebuilt without its constructor, which may need arguments.

Only torch's own functions are in the pickle, so loading it needs the class and torch, not this package.

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
    """The result of ``__reduce_ex__`` for ``parameter``: it keeps class and attributes, and calls ``__setstate__``.

    Args:
        parameter: a parameter of any subclass of ``torch.nn.Parameter``.
        data: its data as a plain tensor.
        state: the result of ``torch._utils._get_obj_state``, which calls the ``__getstate__`` of the class.
        before: attributes to set before ``__setstate__`` of the class, which may ignore or change them.
    """
    torch = sys.modules["torch"]
    cls = type(parameter)
    if before:
        # `as_subclass` would create another object, without these attributes.
        empty = _Reduced((torch.Tensor._make_subclass, (cls, data, parameter.requires_grad)))
        return torch._tensor._rebuild_from_type_v2, (torch._utils._set_obj_state, cls, (empty, before), state)
    # `as_subclass` would be an operation in the autograd graph.
    create, arguments = (
        (torch.Tensor._make_subclass, (cls, data, True))
        if parameter.requires_grad
        else (torch._utils._rebuild_parameter, (data, False, OrderedDict()))
    )
    return torch._tensor._rebuild_from_type_v2, (create, cls, arguments, state)


def with_others(reduced: tuple[Any, ...], others: dict[str, Any]) -> tuple[Any, ...]:
    """``reduced``, and then the attributes ``others``, which the class's ``__setstate__`` does not restore."""
    return sys.modules["torch"]._utils._set_obj_state, (_Reduced(reduced), others)


def of_the_user(parameter: Any, state: Any, known: Collection[str]) -> dict[str, Any]:
    """The attributes that a user set on ``parameter`` and that its ``__getstate__`` returned unchanged.

    Args:
        parameter: a parameter of a class with its own ``__setstate__``.
        state: the result of its ``__getstate__``.
        known: the attributes that the library sets.
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
    """An object that is pickled as ``reduced``."""

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self._reduced = reduced

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self._reduced
