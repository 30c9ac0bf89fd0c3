"""An autograd context for direct calls of the backward pass of optimum-quanto's linear function.

Upstream: optimum/quanto/tensor/function.py (``QuantizedLinearFunction``).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["BackwardContext"]


class BackwardContext:
    """The attributes of an autograd context that ``backward`` reads, with given tensors.

    Args:
        taken: the input of the layer, of shape (..., in_features).
        weight: the weight, of shape (out_features, in_features).
        needs_input_grad: whether the gradients of input, weight and bias are needed.
    """

    def __init__(self, taken: Any, weight: Any, needs_input_grad: tuple[bool, ...]) -> None:
        self.saved_tensors = taken, weight
        self.needs_input_grad = needs_input_grad
