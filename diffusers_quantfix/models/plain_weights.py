"""Quantized layers under code that takes their weights for plain ones.

Such code casts its input to ``layer.weight.dtype``, which is uint8 or int8 where the weight is packed: the input is
destroyed. Or it gives the weight to ``torch.nn.functional.linear`` itself. For one call it gets an object in the place
of its module, in which these layers have a weight of the dtype that the input is to have.
"""

from __future__ import annotations

import sys

from ..weights.wrappers import backend_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = [
    "InPlaceOf",
    "LayerCalled",
    "is_packed",
    "is_plain",
    "packed_stand_in",
    "with_called_weights",
    "with_floating_weights",
]


def is_packed(module: Any) -> bool:
    """Whether the first weight of a module is packed (bitsandbytes, GGUF)."""
    parameter = next(iter(module.parameters()), None)
    return parameter is not None and _holds_packed(parameter)


def _holds_packed(parameter: Any) -> bool:
    # bytes of bitsandbytes may be stored as a floating dtype: bnb_4bit_quant_storage
    return not parameter.dtype.is_floating_point or backend_of(parameter) == "bitsandbytes"


def is_plain(layer: Any) -> bool:
    """Whether a layer's weight is one that torch's own functions take: not packed, and no wrapper of one (torchao)."""
    return type(layer.weight) is sys.modules["torch"].nn.Parameter and not is_packed(layer)


def with_floating_weights(module: Any, *names: str, dtype: Any = None) -> Any:
    """``module``, or what to pass as ``self`` to one of its methods where one of the children ``names`` is packed.

    The weights that it shows there have ``dtype``, by default that of the layer's bias.
    """
    packed = [name for name in names if is_packed(getattr(module, name))]
    if not packed:
        return module
    return InPlaceOf(module, {name: _Floating(getattr(module, name), dtype) for name in packed})


def with_called_weights(module: Any, *names: str) -> Any:
    """``module``, or what to pass as ``self`` to one of its methods, which gives the weights and the biases of the
    children ``names`` as float32 to ``torch.nn.functional.linear``: quantized children are called instead."""
    quantized = [name for name in names if not is_plain(getattr(module, name))]
    if not quantized:
        return module
    return InPlaceOf(module, {name: _Called(getattr(module, name)) for name in quantized})


class InPlaceOf:
    """A module in which some children are others."""

    def __init__(self, module: Any, children: dict[str, Any]) -> None:
        self._module = module
        self._children = children

    def __getattr__(self, name: str) -> Any:
        children = self._children
        return children[name] if name in children else getattr(self._module, name)


class _Called:
    """A layer with a bias, as its weight: ``linear`` of it calls the layer, and its bias is the layer's business."""

    bias = None

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.weight = self
        self.dtype = layer.bias.dtype

    def float(self) -> _Called:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs, weight, bias = args
        if func is not sys.modules["torch"].nn.functional.linear or kwargs or bias is not None:
            return NotImplemented
        return weight._layer(inputs.to(weight.dtype)).float()


class _Floating:
    """A child, or a sequence of layers, that computes as before, and shows one empty weight of ``dtype``, or of the
    dtype of its biases, which are not packed."""

    def __init__(self, child: Any, dtype: Any) -> None:
        torch = sys.modules["torch"]
        floating = (parameter.dtype for parameter in child.parameters() if not _holds_packed(parameter))
        self._child = child
        self._dtype = dtype
        self.weight = torch.empty(0, dtype=dtype or next(floating, torch.float32))

    def parameters(self) -> Iterator[Any]:
        return iter((self.weight,))

    def __getitem__(self, index: int) -> Any:
        return _Floating(self._child[index], self._dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._child(*args, **kwargs)


class LayerCalled(Exception):
    """The layer of `packed_stand_in` was called, as a quantized layer has to be: with inputs of ``dtype``."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype


def packed_stand_in(features: int) -> Any:
    """A probe's layer with a packed weight and a bias [features]. It raises `LayerCalled` when it is called."""
    import torch

    def called(layer: Any, inputs: tuple[Any, ...]) -> None:
        raise LayerCalled(inputs[0].dtype)

    layer = torch.nn.Identity()
    layer.weight = torch.nn.Parameter(torch.empty(1, 1, dtype=torch.uint8), requires_grad=False)
    layer.bias = torch.nn.Parameter(torch.empty(features))
    layer.register_forward_pre_hook(called)
    return layer
