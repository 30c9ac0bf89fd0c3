"""Quantized layers under code that takes their weights for plain ones.

Such code casts its input to ``layer.weight.dtype``, which is uint8 or int8 where the weight is packed: the input is
destroyed. For one call that code gets an object in the place of its module, in which these layers have a parameter of
the dtype that the input is to have.
"""

from __future__ import annotations

import sys

from ..weights.wrappers import backend_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["LayerCalled", "is_packed", "is_plain", "packed_stand_in", "with_floating_weights"]


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


def with_floating_weights(module: Any, *names: str) -> Any:
    """``module``, or what to pass as ``self`` to one of its methods where one of the children ``names`` is packed."""
    packed = [name for name in names if is_packed(getattr(module, name))]
    if not packed:
        return module
    return _InPlaceOf(module, {name: _Floating(getattr(module, name)) for name in packed})


class _InPlaceOf:
    """A module in which some children are others."""

    def __init__(self, module: Any, children: dict[str, Any]) -> None:
        self._module = module
        self._children = children

    def __getattr__(self, name: str) -> Any:
        children = self._children
        return children[name] if name in children else getattr(self._module, name)


class _Floating:
    """A child, or a sequence of layers, that computes as before, and shows one empty weight of the dtype of its biases,
    which are not packed."""

    def __init__(self, child: Any) -> None:
        torch = sys.modules["torch"]
        floating = (parameter.dtype for parameter in child.parameters() if not _holds_packed(parameter))
        self._child = child
        self.weight = torch.empty(0, dtype=next(floating, torch.float32))

    def parameters(self) -> Iterator[Any]:
        return iter((self.weight,))

    def __getitem__(self, index: int) -> Any:
        return _Floating(self._child[index])

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
