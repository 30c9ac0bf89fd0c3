"""Functions of optimum-quanto that pass their input on to a kernel, which takes contiguous rows.

Upstream: optimum/quanto/tensor/weights (``AWQWeightQBitsLinearFunction``, ``TinyGemmQBitsLinearFunction``).
"""

from __future__ import annotations

from ..engine.probe import names_used

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["asks_no_layout", "contiguous"]


def asks_no_layout(forward: Any) -> bool:
    """Whether the function never checks the input's memory layout; for probes. The kernel itself needs a GPU."""
    asked = {"contiguous", "is_contiguous", "stride"}
    return not asked & names_used(forward)


def contiguous(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward``: an input that is not contiguous is copied; the input itself is saved for the backward pass."""

    def forward(ctx: Any, input: Any, other: Any, bias: Any = None) -> Any:
        if input.is_contiguous():
            return original(ctx, input, other, bias)
        output = original(ctx, input.contiguous(), other, bias)
        ctx.save_for_backward(input, other)
        return output

    return forward
