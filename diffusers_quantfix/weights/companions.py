"""The companions of a quantized layer: the tensors that must be on the device of its weight.

A bitsandbytes weight is more than its bytes. A 4-bit ``Params4bit`` has a ``QuantState`` (absmax, code, and for double
quantization offset and the nested state2); the layer refers to the same object as ``layer.quant_state``. An 8-bit
``Int8Params`` has CB and SCB; after the first forward pass ``layer.state``, a ``MatmulLtState``, has them. None of
these is a parameter or buffer, so torch does not move, count or save them. The fixes that move them and the tools that
search for them share these functions.

A host copy is the ``QuantState`` of a weight on ``meta``: its tensors stay on the CPU while the weight is offloaded and
onloaded. It is an ordinary ``QuantState``. Two plain attributes, which can be pickled and which bitsandbytes does not
read, mark it: ``_is_host_copy`` on the copy, and ``_host_copy`` on a state that was made from it for a device.

Neither torch nor bitsandbytes is imported here: if there is a quantized layer, both are already imported.

Upstream: bitsandbytes/functional.py (``QuantState``), bitsandbytes/nn/modules.py (``Params4bit``, ``Int8Params``),
bitsandbytes/autograd/_functions.py (``MatmulLtState``).
"""

from __future__ import annotations

import sys

from ..engine.by_identity import ByIdentity
from ..engine.classes import class_name, is_a, lasts, mro
from ..engine.interruptions import heed_interruption

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = [
    "Companion",
    "carries",
    "companions",
    "holders",
    "host_copy",
    "is_host_copy",
    "is_quant_state",
    "move_quant_state",
    "on_device",
    "replace_states",
]


class _Named(dict[type, bool]):
    """Type -> whether it or one of its base classes has one of these names.

    By name, so that a layer can be inspected without importing bitsandbytes. Cached, since `track` checks every
    attribute of every layer at every sample; there are few types.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._passing = ByIdentity()  # of classes that are not kept

    def __missing__(self, kind: type) -> bool:
        known: bool | None = self._passing.get(kind)
        if known is None:
            known = any(class_name(cls) in self._names for cls in mro(kind))
            if lasts(kind):
                self[kind] = known
            else:
                self._passing.put(kind, known)
        return known


# The classes whose instances carry companions.
_quant_states = _Named("QuantState")
_carriers = _Named("QuantState", "MatmulLtState")
carries: Callable[[type], bool] = _carriers.__getitem__
_quantized_parameters = _Named("Params4bit", "Int8Params")
_no_carriers = ByIdentity()  # classes
# Names and types of an object's attributes -> the names of tensors, and of objects that carry some. Cached, since a
# group is searched twice per step. Names and types determine the result, so that it never goes stale.
_Layout = tuple[tuple[str, ...], tuple[str, ...]]
_layouts: dict[tuple[Any, ...], _Layout] = {}
_MOST_LAYOUTS = 10_000
_HOST_COPY = "_host_copy"
_IS_HOST_COPY = "_is_host_copy"


class Companion:
    """One tensor that belongs to a quantized weight.

    Attributes:
        name: its path on the layer, e.g. ``weight.quant_state.state2.absmax`` or ``state.SCB``.
        holder: the object that has it as an attribute (``QuantState``, ``MatmulLtState`` or the parameter).
        attribute: its name there: ``setattr(companion.holder, companion.attribute, moved)`` replaces it.
        tensor: the tensor. CB of an 8-bit layer is usually an alias of ``weight.data``: count storages, not tensors.
    """

    __slots__ = ("attribute", "holder", "name", "tensor")

    def __init__(self, name: str, holder: Any, attribute: str, tensor: Any) -> None:
        self.name = name
        self.holder = holder
        self.attribute = attribute
        self.tensor = tensor

    def __repr__(self) -> str:
        return (
            f"Companion({self.name}, {tuple(self.tensor.shape)}, {self.tensor.dtype}, {self.tensor.device})"
        )


def is_quant_state(value: Any) -> bool:
    """Whether ``value`` is a bitsandbytes ``QuantState``."""
    return _quant_states[type(value)]


def companions(module: Any) -> Iterator[Companion]:
    """Yield the companions of the weights that ``module`` itself owns, not of its submodules.

    A holder that the layer refers to twice (``weight.quant_state`` is ``quant_state``) is visited once, under the name
    of the parameter. A host copy is included as the quant state of a weight on ``meta``, but not as the source of a
    quant state on a device.
    """
    for name, holder, attributes in holders(module):
        for attribute in attributes:
            tensor = vars(holder).get(attribute)
            if tensor is not None:  # else the first pass of another thread has moved it meanwhile
                yield Companion(f"{name}.{attribute}", holder, attribute, tensor)


def holders(module: Any) -> list[tuple[str, Any, tuple[str, ...]]]:
    """The holders of the companions of ``module``: path on the layer, object, and attribute names of its tensors.

    The same companions as `companions`, but faster. Weights and quant states without tensors are included.
    """
    found: list[tuple[str, Any, tuple[str, ...]]] = []
    seen: set[int] = set()
    for name, parameter in module._parameters.items():
        if _quantized_parameters[type(parameter)]:
            _walk(name, parameter, seen, found)
    held = vars(module)
    if not found:
        # Nearly all attributes carry none, and a model may have a million of them.
        try:
            if _no_carriers.has_all(map(type, held.values())):
                return found
            for kind in set(map(type, held.values())):
                if not _carriers[kind]:
                    _no_carriers.put(kind, True)
        except Exception as error:  # a metaclass may make its classes unhashable
            heed_interruption(error)
            held = {name: value for name, value in held.items() if _is_hashable(type(value))}
    for name in _layout(held)[1]:
        _walk(name, held[name], seen, found)
    return found


def _is_hashable(kind: type) -> bool:
    try:
        hash(kind)
    except Exception as error:
        heed_interruption(error)
        return False
    return True


def move_quant_state(state: Any, device: Any, non_blocking: bool = False) -> None:
    """Move every tensor of a ``QuantState`` to ``device``, in place, as needed in ``nn.Module.to`` of the layer."""
    for _, holder, attributes in _walk("", state, set(), []):
        for attribute in attributes:
            setattr(holder, attribute, vars(holder)[attribute].to(device, non_blocking=non_blocking))


def on_device(state: Any, device: Any, non_blocking: bool = False) -> Any:
    """A new ``QuantState`` with the tensors of ``state`` on ``device``; ``state`` is not changed.

    Tensors already on ``device`` are shared, not copied. A state made from a host copy refers to it.
    """
    duplicate = _duplicate(state, device, non_blocking)
    if is_host_copy(state):
        delattr(duplicate, _IS_HOST_COPY)
        setattr(duplicate, _HOST_COPY, state)
    return duplicate


def replace_states(module: Any, others: dict[int, tuple[Any, Any]]) -> None:
    """Replace the states of ``module`` and its weights by equal state objects that share their tensors.

    Args:
        module: a module; a state is an attribute of it or of one of its own parameters.
        others: ``id`` of a state or of its replacement -> (state, replacement). Pass the same dict for several modules,
            so that shared states stay shared. It is updated.
    """
    parameters = (one for one in module._parameters.values() if _quantized_parameters[type(one)])
    for owner in (*parameters, module):
        held = vars(owner)
        for name in _layout(held)[1]:
            state = held[name]
            if id(state) not in others:
                other = _sharing(state)
                # Both are kept alive, so that their ids are not reused.
                others[id(state)] = others[id(other)] = state, other
            held[name] = others[id(state)][1]


def host_copy(state: Any) -> Any:
    """The ``QuantState`` on the CPU that replaces ``state`` while its weight is on ``meta``.

    No tensor is copied if ``state`` was made from a host copy, is one, or is on the CPU. A state without data (one with
    a tensor on ``meta``, or a foreign object) is returned as it is.
    """
    known = vars(state).get(_HOST_COPY)
    if known is not None:
        return known
    tensors = [vars(holder)[name] for _, holder, names in _walk("", state, set(), []) for name in names]
    if is_host_copy(state) or not tensors or any(tensor.is_meta for tensor in tensors):
        return state
    copy = _duplicate(state, "cpu", False)
    setattr(copy, _IS_HOST_COPY, True)
    return copy


def is_host_copy(state: Any) -> bool:
    """Whether ``state`` is the host copy of a weight that is on ``meta``."""
    return _IS_HOST_COPY in vars(state)


def _duplicate(state: Any, device: Any, non_blocking: bool) -> Any:
    tensor = sys.modules["torch"].Tensor
    duplicate = object.__new__(type(state))
    held = vars(duplicate)
    for name, value in vars(state).items():
        if isinstance(value, tensor):
            held[name] = value.to(device, non_blocking=non_blocking)
        elif name != _HOST_COPY:
            held[name] = _duplicate(value, device, non_blocking) if is_quant_state(value) else value
    return duplicate


def _sharing(state: Any) -> Any:
    """A copy of ``state`` and its nested states, with the same tensors."""
    duplicate = object.__new__(type(state))
    for name, value in vars(state).items():
        vars(duplicate)[name] = _sharing(value) if _carriers[type(value)] and name != _HOST_COPY else value
    return duplicate


def _walk(
    name: str, holder: Any, seen: set[int], found: list[tuple[str, Any, tuple[str, ...]]]
) -> list[tuple[str, Any, tuple[str, ...]]]:
    """Add ``holder`` and its nested carriers to ``found``, and return ``found``."""
    if id(holder) not in seen:
        seen.add(id(holder))
        held = vars(holder)
        tensors, carriers = _layout(held)
        found.append((name, holder, tensors))
        for attribute in carriers:
            if attribute != _HOST_COPY:
                _walk(f"{name}.{attribute}" if name else attribute, held[attribute], seen, found)
    return found


def _layout(held: dict[str, Any]) -> _Layout:
    """The names of the attributes that are tensors, and of those that carry tensors."""
    kinds = tuple(map(type, held.values()))
    key = *held, *kinds
    known = _layouts.get(key)
    if known is None:
        tensor = sys.modules["torch"].Tensor
        items = list(held.items())
        tensors = tuple(name for name, value in items if is_a(value, tensor))
        carriers = tuple(name for name, value in items if _carriers[type(value)])
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        known = tensors, carriers
        if all(map(lasts, kinds)):
            _layouts[key] = known
    return known
