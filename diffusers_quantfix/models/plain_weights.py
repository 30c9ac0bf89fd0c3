"""Quantized layers in code that assumes plain weights.

Such code casts its input to ``layer.weight.dtype``, which is uint8 or int8 for a packed weight: the input is destroyed.
Or it passes the weight to ``torch.nn.functional.linear`` itself. For one call, its module is replaced by an object in
which these layers show a weight of the dtype that the input should have.
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
    # bitsandbytes may store the bytes in a floating dtype: bnb_4bit_quant_storage
    return not parameter.dtype.is_floating_point or backend_of(parameter) == "bitsandbytes"


def is_plain(layer: Any) -> bool:
    """Whether torch's own functions accept a layer's weight: it is neither packed nor a wrapper (torchao)."""
    return type(layer.weight) is sys.modules["torch"].nn.Parameter and not is_packed(layer)


def with_floating_weights(module: Any, *names: str, dtype: Any = None) -> Any:
    """``module``, or a replacement to pass as ``self`` to a method if one of the children ``names`` is packed.

    In the replacement the packed children show a weight of ``dtype``, by default the dtype of the layer's bias.
    """
    packed = [name for name in names if is_packed(getattr(module, name))]
    if not packed:
        return module
    return InPlaceOf(module, {name: _Floating(getattr(module, name), dtype) for name in packed})


def with_called_weights(module: Any, *names: str) -> Any:
    """``module``, or a replacement to pass as ``self`` to a method that passes weights and biases of the children
    ``names`` as float32 to ``torch.nn.functional.linear``: quantized children are called instead."""
    quantized = [name for name in names if not is_plain(getattr(module, name))]
    if not quantized:
        return module
    return InPlaceOf(module, {name: _Called(getattr(module, name)) for name in quantized})


class InPlaceOf:
    """A module with some children replaced; it computes as the module itself."""

    def __init__(self, module: Any, children: dict[str, Any]) -> None:
        self._module = module
        self._children = children

    def __getattr__(self, name: str) -> Any:
        children = self._children
        return children[name] if name in children else getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)


class _Called:
    """A layer with a bias that is also its own weight: ``linear`` of it calls the layer, which adds the bias."""

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
    """A layer, or a sequence of layers, that computes as before but shows one empty weight of ``dtype``, by default
    the dtype of its biases, which are not packed."""

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
    """The layer of `packed_stand_in` was called, with inputs of ``dtype``."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype


def packed_stand_in(features: int) -> Any:
    """A layer for probes with a packed weight and a bias [features]. Calling it raises `LayerCalled`."""
    import torch

    def called(layer: Any, inputs: tuple[Any, ...]) -> None:
        raise LayerCalled(inputs[0].dtype)

    layer = torch.nn.Identity()
    layer.weight = torch.nn.Parameter(torch.empty(1, 1, dtype=torch.uint8), requires_grad=False)
    layer.bias = torch.nn.Parameter(torch.empty(features))
    layer.register_forward_pre_hook(called)
    return layer
