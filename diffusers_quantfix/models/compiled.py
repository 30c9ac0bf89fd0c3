"""Models that ``torch.compile(model)`` wraps.

Upstream: ``OptimizedModule`` of torch/_dynamo/eval_frame.py.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["is_compiled", "uncompiled"]


def is_compiled(model: Any) -> bool:
    """Whether ``model``, any object, is torch's ``OptimizedModule``. Asked by name: its module brings the compiler."""
    return type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod")


def uncompiled(model: Any) -> Any:
    """The model that was compiled, or ``model`` itself. A compiled one has a truth value only if it has a length."""
    return model._orig_mod if is_compiled(model) else model
