"""What the backward pass of a linear layer of optimum-quanto reads of its call, for those who call it themselves.

Upstream: optimum/quanto/tensor/function.py (``QuantizedLinearFunction``).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["BackwardContext"]


class BackwardContext:
    """What ``backward`` reads of the context of a call, with other tensors in it.

    Args:
        taken: the input of the layer, of shape (..., in_features).
        weight: the weight, of shape (out_features, in_features).
        needs_input_grad: whether the gradient of the input, of the weight and of the bias is asked for.
    """

    def __init__(self, taken: Any, weight: Any, needs_input_grad: tuple[bool, ...]) -> None:
        self.saved_tensors = taken, weight
        self.needs_input_grad = needs_input_grad
