"""Every tensor that a component holds, in any place: one walk for `audit`, `release` and `track`.

The inner tensors of wrappers (optimum-quanto, torchao) are found through ``__tensor_flatten__``, so that no library is
named here. GGUF and bitsandbytes weights hold their own bytes. Companions of bitsandbytes layers come from
`diffusers_quantfix.weights.companions`, tensors kept by offload hooks from `diffusers_quantfix.placement.offloaded`.
All other attributes of a module (caches of attention processors, rotary tables, a user's dict) are found by walking
plain containers and objects.

Most modules of a large model have only plain parameters and buffers. A cheap check (`_only_registered`) finds these
first, and only the others are searched thoroughly.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..adapters.before_merge import KEPT
from ..engine.classes import class_name, elements_of, is_a, items_of, namespace, slots_of, text_of
from ..engine.interruptions import heed_interruption
from ..weights.companions import companions
from .components import is_module, is_pipeline
from .modules import named_modules
from .offloaded import HOOK_ATTRIBUTES, Resting

__all__ = [
    "BEFORE_MERGE",
    "PLAIN",
    "Held",
    "device_name",
    "held_in",
    "held_tensors",
    "is_lazy",
    "nbytes",
    "plain_tensors",
    "short",
    "span",
    "storage_of",
    "tensors_of",
]

# The attributes that every Module has: they are walked by name below, or have no tensors.
_OF_MODULE = frozenset(vars(torch.nn.Module()))
# A tensor of one of these types is itself the data and has no companions.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
# The kind of the packed weights that our fixes keep while an adapter is merged.
BEFORE_MERGE = "before merge"
_DEPTH = 6
_LONGEST = 200  # bits of a number that is written out
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    types.FunctionType,  # a user's hook may collect activations in its closure, which do not belong to the model
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
_LEAF_TYPES = frozenset({*_LEAVES, bool})
_LISTS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)


@dataclass(eq=False, slots=True)
class Held:
    """One plain tensor (never a wrapper) and what holds it.

    Attributes:
        component: the component's name.
        name: the dotted name within the component, e.g. ``blocks.0.proj.weight.quant_state.absmax``.
        kind: "weight", "buffer", "gradient", "quant state", "8-bit state", "offloaded", "before merge", "attribute".
        tensor: the tensor.
        module: the module that holds it, None for a component that is not a module.
        outer: the wrapper whose inner tensor it is, or None.
    """

    component: str
    name: str
    kind: str
    tensor: torch.Tensor
    module: Any = None
    outer: Any = None


def held_tensors(component: str, value: Any) -> Iterator[Held]:
    """Yield every tensor that ``value`` (a module, or any object) holds, each tensor object once, in a stable order.

    Weights come before their companions, so that an alias (CB of ``weight.data``) comes second.
    """
    seen: set[int] = set()
    found = (
        _of_modules(component, named_modules(value), seen)
        if is_module(value)
        else _of_object(component, "", value, seen)
    )
    for held in found:
        if id(held.tensor) not in seen:
            seen.add(id(held.tensor))
            yield held


def tensors_of(modules: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of `held_tensors` without their names: fast enough for every sample of `track`.

    A tied weight is yielded twice: callers that sum bytes must count each byte of memory once.

    Args:
        modules: all modules below one root, or some of them.
    """
    others: list[tuple[str, Any]] = []
    for module in modules:
        if not _only_registered(module):
            others.append(("", module))
            continue
        for named in (module._parameters, module._buffers):
            for tensor in named.values():
                if tensor is not None:
                    yield tensor
                    if tensor.is_leaf and (gradient := tensor.grad) is not None:
                        yield gradient
    seen: dict[int, torch.Tensor] = {}
    for held in _of_modules("", others, set()):
        if id(held.tensor) not in seen:
            seen[id(held.tensor)] = held.tensor
            yield held.tensor


def _only_registered(module: Any) -> bool:
    """Whether all tensors of ``module`` itself are plain parameters and buffers, and their gradients."""
    state = module.__dict__
    try:
        for name in _own_names(tuple(state)):
            if type(state[name]) not in _LEAF_TYPES:
                return False
    except Exception as error:  # a metaclass may make its classes unhashable
        heed_interruption(error)
        return False
    return PLAIN.issuperset(map(type, module._parameters.values())) and PLAIN.issuperset(
        map(type, module._buffers.values())
    )


@functools.lru_cache(4096)
def _own_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The attribute names that not every Module has; cached, since layers of one class have the same names."""
    return tuple(name for name in names if name not in _OF_MODULE)


def _of_modules(component: str, modules: list[tuple[str, Any]], seen: set[int]) -> Iterator[Held]:
    others: list[tuple[str, Any]] = []
    resting = Resting()
    for path, module in modules:
        prefix = f"{path}." if path else ""
        registered = (("weight", module._parameters), ("buffer", module._buffers))
        if _only_registered(module):
            for kind, named in registered:
                for name, tensor in named.items():
                    if tensor is not None:
                        yield Held(component, f"{prefix}{name}", kind, tensor, module)
                        if tensor.is_leaf and (gradient := tensor.grad) is not None:
                            yield Held(component, f"{prefix}{name}.grad", "gradient", gradient, module)
            continue
        for kind, named in registered:
            for name, tensor in named.items():
                if not isinstance(tensor, torch.Tensor):
                    continue
                for inner, plain, is_inner in plain_tensors(f"{prefix}{name}", tensor):
                    yield Held(component, inner, kind, plain, module, tensor if is_inner else None)
                # torch warns on a read of ``.grad`` of a non-leaf tensor.
                if tensor.is_leaf and (gradient := tensor.grad) is not None:
                    yield Held(component, f"{prefix}{name}.grad", "gradient", gradient, module)
        others.append((path, module))
        for found in companions(module):
            kind = "quant state" if "quant_state" in found.name else "8-bit state"
            for name, tensor, _ in plain_tensors(prefix + found.name, found.tensor):
                yield Held(component, name, kind, tensor, module)
        for name, tensor in resting.tensors(module, path):
            for inner, plain, _ in plain_tensors(name, tensor):
                yield Held(component, inner, "offloaded", plain, module)
    # After all weights: an attribute or a hook often refers to a weight again.
    for path, module in others:
        prefix = f"{path}." if path else ""
        state = vars(module)
        for name in _own_names(tuple(state)):
            kind = "offloaded" if name in HOOK_ATTRIBUTES else BEFORE_MERGE if name == KEPT else "attribute"
            yield from _of_object(component, prefix + name, state.get(name), seen, module, kind)


def _of_object(
    component: str,
    name: str,
    value: Any,
    seen: set[int],
    module: Any = None,
    kind: str = "attribute",
    depth: int = 0,
) -> Iterator[Held]:
    # Check types only: `isinstance` would run the code of a lazy proxy.
    if is_a(value, torch.Tensor):
        for inner, plain, _ in plain_tensors(name, value):
            yield Held(component, inner, kind, plain, module)
        return
    if depth > _DEPTH or is_a(value, _LEAVES) or id(value) in seen or is_module(value) or is_pipeline(value):
        return
    seen.add(id(value))
    children: Iterator[tuple[str, Any]]
    # Through the base class: a subclass may compute or fetch its items.
    if is_a(value, dict):
        children = ((f"{name}[{short(key)}]", item) for key, item in items_of(value))
        # diffusers' group offloading has dicts with parameters as keys, which are walked as weights.
    elif (base := next((base for base in _LISTS if is_a(value, base)), None)) is not None:
        children = ((f"{name}[{index}]", item) for index, item in enumerate(elements_of(value, base)))
    else:
        held = [*items_of(namespace(value) or {}), *slots_of(value)]
        children = ((f"{name}.{key}" if name else text_of(key), item) for key, item in held)
    for child, item in children:
        if not is_a(item, _LEAVES):
            yield from _of_object(component, child, item, seen, module, kind, depth + 1)


def held_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in an attribute of a module, including those in inner containers and objects."""
    for held in _of_object("", "", value, set()):
        yield held.tensor


def plain_tensors(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield ``(name, tensor, is_inner)`` of ``tensor`` itself, or of all inner tensors of a wrapper, even nested."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor, False
        return
    try:
        attributes = flatten(tensor)[0]
    except Exception as error:  # half made, or a subclass of its own
        heed_interruption(error)
        return
    for attribute in attributes:
        inner = getattr(tensor, attribute, None)
        if isinstance(inner, torch.Tensor):
            for nested, plain, _ in plain_tensors(f"{name}.{attribute}", inner):
                yield nested, plain, True


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether this is a parameter or buffer of a lazy module before its first forward pass.

    It has no shape and no memory, and reading them raises.
    """
    return is_a(tensor, torch.nn.parameter.UninitializedTensorMixin)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; None if it has none (sparse, functional, a wrapper, a lazy parameter)."""
    if is_lazy(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except Exception as error:  # a subclass may raise anything
        heed_interruption(error)
        return None


@functools.cache
def device_name(device: torch.device) -> str:
    """``str(device)``, cached: torch builds the text each time."""
    return str(device)


def span(tensor: torch.Tensor) -> int:
    """The bytes from the first to the last element of a plain tensor with a storage, including gaps."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return nbytes(tensor)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of the elements of a plain tensor, without gaps; 0 for a lazy parameter."""
    if is_lazy(tensor):
        return 0
    return int(tensor.numel()) * int(tensor.element_size())


def short(key: Any) -> str:
    """A dictionary's key for messages."""
    if type(key) is int and key.bit_length() > _LONGEST:
        return "..."  # Python refuses to write the longest out
    if type(key) in (str, int, float, bool):
        return repr(key)[:60]
    return class_name(type(key))
