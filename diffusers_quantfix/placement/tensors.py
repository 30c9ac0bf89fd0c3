"""Every tensor that a component holds, wherever it hangs: one walk for `audit`, `release` and `track`.

A weight of a tensor subclass that wraps others (optimum-quanto, torchao) is walked into through
``__tensor_flatten__``, so that no library has to be named. GGUF and bitsandbytes weights hold their own bytes.
Companions of bitsandbytes layers come from `diffusers_quantfix.weights.companions`. What offload hooks keep aside
comes from `diffusers_quantfix.placement.hooks`. Everything else that hangs on a module (caches of attention
processors, rotary tables, a dict of the user's) is found by walking plain containers and objects.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..weights.companions import companions
from .components import is_module, is_pipeline
from .hooks import HOOK_ATTRIBUTES, resting_tensors

__all__ = [
    "Held",
    "bearing_modules",
    "held_tensors",
    "is_lazy",
    "nbytes",
    "plain_tensors",
    "storage_of",
    "storage_span",
]

# What a Module keeps for itself: walked by name below, or without tensors.
_OF_MODULE = frozenset(vars(torch.nn.Module()))
_DEPTH = 6
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    types.FunctionType,  # a user's hook may collect activations in its closure: those are not the model's
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
    types.FrameType,
    types.TracebackType,
    types.GeneratorType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.Generator,
    functools.partial,
)


@dataclass(eq=False)
class Held:
    """One plain tensor (never a wrapper) and where it hangs.

    Attributes:
        component: the component's name.
        name: the dotted name within the component, e.g. ``blocks.0.proj.weight.quant_state.absmax``.
        kind: "weight", "buffer", "gradient", "quant state", "8-bit state", "offloaded", "attribute".
        tensor: the tensor.
        module: the module on which it hangs, None for components that are no modules.
        outer: the wrapper whose inner tensor it is, or None.
    """

    component: str
    name: str
    kind: str
    tensor: torch.Tensor
    module: Any = None
    outer: Any = None


def held_tensors(component: str, value: Any) -> Iterator[Held]:
    """Every tensor that ``value`` (a module, or any object) holds, each tensor object once, in a stable order.

    Weights come before what belongs to them, so that an alias (CB of ``weight.data``) comes second.
    """
    seen: set[int] = set()
    for held in (
        _of_module(component, value, seen) if is_module(value) else _of_object(component, "", value, seen)
    ):
        if id(held.tensor) not in seen:
            seen.add(id(held.tensor))
            yield held


def bearing_modules(root: Any) -> list[Any]:
    """``root``, and the modules below it that hold tensors themselves or further down.

    The rest may belong to everyone: diffusers before 0.33 has one ``nn.SiLU()`` for all models of the process.
    """
    own = {id(module) for module in root.modules() if _bears(module)}
    return [
        module
        for module in root.modules()
        if module is root or any(id(part) in own for part in module.modules())
    ]


def _bears(module: Any) -> bool:
    if any(
        tensor is not None for named in (module._parameters, module._buffers) for tensor in named.values()
    ):
        return True
    return next(companions(module), None) is not None


def _of_module(component: str, root: Any, seen: set[int]) -> Iterator[Held]:
    for path, module in root.named_modules():
        prefix = f"{path}." if path else ""
        for kind, named in (("weight", module._parameters), ("buffer", module._buffers)):
            for name, tensor in named.items():
                if isinstance(tensor, torch.Tensor):
                    for held in plain_tensors(prefix + name, tensor):
                        yield Held(component, held[0], kind, held[1], module, tensor if held[2] else None)
                    gradient = tensor.grad if tensor.is_leaf else None
                    if gradient is not None:
                        yield Held(component, f"{prefix}{name}.grad", "gradient", gradient, module)
        for found in companions(module):
            kind = "quant state" if "quant_state" in found.name else "8-bit state"
            for name, tensor, _ in plain_tensors(prefix + found.name, found.tensor):
                yield Held(component, name, kind, tensor, module)
        for name, tensor in resting_tensors(module, path):
            for inner, plain, _ in plain_tensors(name, tensor):
                yield Held(component, inner, "offloaded", plain, module)
    # After all weights are named: an attribute or a hook often holds a weight once more.
    for path, module in root.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in list(vars(module).items()):
            if name not in _OF_MODULE:
                kind = "offloaded" if name in HOOK_ATTRIBUTES else "attribute"
                yield from _of_object(component, prefix + name, value, seen, module, kind)


def _of_object(
    component: str,
    name: str,
    value: Any,
    seen: set[int],
    module: Any = None,
    kind: str = "attribute",
    depth: int = 0,
) -> Iterator[Held]:
    if isinstance(value, torch.Tensor):
        for inner, plain, _ in plain_tensors(name, value):
            yield Held(component, inner, kind, plain, module)
        return
    if (
        depth > _DEPTH
        or isinstance(value, _LEAVES)
        or id(value) in seen
        or is_module(value)
        or is_pipeline(value)
    ):
        return
    seen.add(id(value))
    children: Iterator[tuple[str, Any]]
    if isinstance(value, Mapping) and isinstance(value, dict):
        children = ((f"{name}[{_short(key)}]", item) for key, item in list(value.items()))
        # diffusers' group offloading has dicts whose keys are the parameters: those are walked as weights.
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = ((f"{name}[{index}]", item) for index, item in enumerate(list(value)))
    elif hasattr(type(value), "__dict__") and hasattr(value, "__dict__"):
        children = ((f"{name}.{key}" if name else key, item) for key, item in list(vars(value).items()))
    else:
        return
    for child, item in children:
        if not isinstance(item, _LEAVES):
            yield from _of_object(component, child, item, seen, module, kind, depth + 1)


def plain_tensors(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """``(name, tensor, is_inner)`` of ``tensor`` itself, or of the tensors inside a wrapper, however deeply nested."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor, False
        return
    for attribute in flatten(tensor)[0]:
        inner = getattr(tensor, attribute, None)
        if isinstance(inner, torch.Tensor):
            for nested, plain, _ in plain_tensors(f"{name}.{attribute}", inner):
                yield nested, plain, True


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether this is a parameter or buffer of a lazy module before its first forward pass: it has no shape and no
    memory, and torch raises when it is asked for them."""
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain tensor, None where there is none (sparse, functional, a wrapper, a lazy parameter)."""
    if is_lazy(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and the one-past-last byte that ``tensor`` uses of its storage."""
    start = tensor.storage_offset() * tensor.element_size()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of the elements of a plain tensor, whatever its layout."""
    if is_lazy(tensor):
        return 0
    return int(tensor.numel()) * int(tensor.element_size())


def _short(key: Any) -> str:
    if isinstance(key, (str, int, float, bool)):
        return repr(key)[:60]
    return type(key).__name__
