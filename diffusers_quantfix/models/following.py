"""Hooks that move a model's inputs, and follow the model when it is moved.

``accelerate.dispatch_model`` can put hooks on a model that is on one device. They move its inputs there, and nothing
updates them when the model is moved. It also puts wrappers that warn over the model's own ``to``, ``cuda`` and the
like, as attributes of the model; ``remove_hook_from_module`` takes away what lies under these names. The fixes for
releases in which such models are common wrap these wrappers.

Neither torch nor another library is imported here at module level.

Upstream: accelerate/big_modeling.py (``dispatch_model``), accelerate/hooks.py (``remove_hook_from_module``).
"""

from __future__ import annotations

import functools

from . import eight_bit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["follow", "follows"]

_MOVES = ("to", "cuda", "xpu", "npu", "mlu", "musa")
_MARK = "_quantfix_hooks_follow"


def follow(model: Any, applies: Callable[[Any], bool]) -> None:
    """Let each later move of ``model`` also update its hooks, if the whole model is on one device then.

    Args:
        model: a ``torch.nn.Module``, as ``dispatch_model`` returned it.
        applies: is called with the model after each move, and says whether its hooks are to follow.
    """
    own = vars(model)
    for name in _MOVES:
        if name in own:
            own[name] = _following(model, own[name], applies)


def follows(model: Any) -> bool:
    """Whether the hooks of ``model``, which may be any object, follow it: see `follow`."""
    try:
        applies = getattr(vars(model).get("to"), _MARK, None)
    except TypeError:  # it has no attributes of its own
        return False
    return applies is not None and applies(model)


def _following(model: Any, move: Any, applies: Callable[[Any], bool]) -> Any:
    @functools.wraps(move)
    def moved(*args: Any, **kwargs: Any) -> Any:
        result = move(*args, **kwargs)
        if applies(model) and eight_bit.can_move(model):
            eight_bit.align(model)
        return result

    setattr(moved, _MARK, applies)
    return moved
