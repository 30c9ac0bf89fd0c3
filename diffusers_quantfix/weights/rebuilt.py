"""Pickling of a parameter of a subclass: it is rebuilt without its constructor, which may need arguments.

Only torch's own functions are in the pickle, so loading it needs the class and torch, not this package.

Upstream: torch/_tensor.py (``_rebuild_from_type_v2``), torch/_utils.py (``_rebuild_parameter``, ``_set_obj_state``).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ..engine.classes import namespace

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import FrameType

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
    if isinstance(state, dict):
        state = dict(
            state
        )  # a pickle contains each dict once: the weight in its own state would get half of it
    refers_back = _refers_to(state, parameter) and not _is_shallow_copy(sys._getframe(1).f_back)
    if refers_back and cls.__setstate__ is not torch.Tensor.__setstate__:
        return torch.Tensor._make_subclass, (cls, data, parameter.requires_grad), state
    # `as_subclass` would be an operation in the autograd graph.
    create, arguments = (
        (torch.Tensor._make_subclass, (cls, data, True))
        if parameter.requires_grad
        else (torch._utils._rebuild_parameter, (data, False, OrderedDict()))
    )
    if refers_back:
        return _later((torch._tensor._rebuild_from_type_v2, (create, cls, arguments, {})), state)
    return torch._tensor._rebuild_from_type_v2, (create, cls, arguments, state)


def with_others(parameter: Any, reduced: tuple[Any, ...], others: dict[str, Any]) -> tuple[Any, ...]:
    """``reduced``, and then the attributes ``others``, which the class's ``__setstate__`` does not restore."""
    set_state = sys.modules["torch"]._utils._set_obj_state
    if _refers_to(others, parameter):
        return _later((set_state, (_Reduced(reduced), {})), others)
    return set_state, (_Reduced(reduced), others)


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


def _later(reduced: tuple[Any, Any], state: Any) -> tuple[Any, ...]:
    """``reduced``, and ``state`` after the object is known to the pickle, so that the state may contain the object.

    Only where it does: ``weights_only=True`` cannot load this, and `copy.copy` does not understand it.
    """
    return *reduced, state, None, None, sys.modules["torch"]._utils._set_obj_state


def _refers_to(state: Any, parameter: Any) -> bool:
    """Whether ``state`` contains ``parameter``, also inside containers and the attributes of other tensors.

    Other objects are not searched: a pickle creates them before their attributes.
    """
    tensor: type = sys.modules["torch"].Tensor
    pending, seen = [state], {id(state)}
    while pending:
        value = pending.pop()
        if value is parameter:
            return True
        if isinstance(value, dict):
            inside = list(dict.values(value))
        elif type(value) in (list, tuple, set, frozenset):
            inside = list(value)
        else:
            inside = list((namespace(value) or {}).values()) if isinstance(value, tensor) else []
        pending += [item for item in inside if id(item) not in seen]
        seen.update(map(id, inside))
    return False


def _is_shallow_copy(caller: FrameType | None) -> bool:
    copy = sys.modules.get("copy")
    return copy is not None and caller is not None and caller.f_code is copy.copy.__code__


class _Reduced:
    """An object that is pickled as ``reduced``."""

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self._reduced = reduced

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self._reduced
