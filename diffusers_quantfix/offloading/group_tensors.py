"""What a group of diffusers' group offloading moves, where a weight is more than one tensor.

Weights of bitsandbytes have companions (quant state, CB, SCB) that are no parameters. Those of optimum-quanto and
torchao are wrappers around inner tensors (`diffusers_quantfix.weights.wrappers`). `places` names every attribute
that holds a tensor of a group, whichever of these it is.

Weights that quanto has packed for a kernel of the CPU can be unpacked, for good (`unpack`): no other device reads them.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

import sys

from ..weights.companions import companions, holders
from ..weights.wrappers import WITH_WRAPPERS, backend_of, follow, inner_places, is_wrapper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

__all__ = [
    "ByMemory",
    "backends",
    "companions_of_parameters",
    "identity",
    "is_on_disk",
    "let_wrappers_follow",
    "places",
    "refuse_wrappers",
    "rejoin",
    "unpack",
]

_NO_WRAPPERS = frozenset(("bitsandbytes",))
_NOT_TO_DISK = (
    "Weights of class {} cannot be offloaded to disk: safetensors does not store their inner tensors. "
    "Offload them to memory, without `offload_to_disk_path`."
)


def places(group: Any) -> Iterator[tuple[Any, str, bool]]:
    """Yield where a tensor stands that has to travel: its holder, the attribute, whether it is a quantized weight's.

    Nothing is remembered from one move to the next: a LoRA, an upgrade of a layer or ``load_state_dict`` may have
    exchanged modules, weights and quant states in between.
    """
    modules = _modules(group)
    on_disk = is_on_disk(group)
    if not on_disk:
        for tensor in _tensors(group, modules):
            backend = backend_of(tensor)
            if backend in WITH_WRAPPERS and is_wrapper(tensor):
                for holder, name in inner_places(tensor):
                    yield holder, name, True
            else:
                yield tensor, "data", backend != ""
    aliases = {(id(holder), name) for holder, name, _ in vars(group).get("_quantfix_aliases", ())}
    for layer in (*modules, *_owners(group)):
        for _, holder, names in holders(layer):
            for name in names:
                if not on_disk or (id(holder), name) not in aliases:
                    yield holder, name, True


def _tensors(group: Any, modules: Iterable[Any] | None = None) -> list[Any]:
    """The parameters and buffers of ``group``, each once; ``modules`` are its modules, where they are known."""
    found = [*group.parameters, *group.buffers]
    for module in _modules(group) if modules is None else modules:
        found += module._parameters.values()
        found += module._buffers.values()
    return list({id(tensor): tensor for tensor in found if tensor is not None}.values())


def _modules(group: Any) -> list[Any]:
    """All modules of ``group``, each once: ``Module.modules`` takes several times as long."""
    found = list(group.modules)
    seen = set(map(id, found))
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def _layers(group: Any) -> list[Any]:
    """The modules that own the parameters of ``group``."""
    return [*_modules(group), *_owners(group)]


def _owners(group: Any) -> list[Any]:
    """The modules whose parameters ``group`` has without having them."""
    known: list[Any] | None = vars(group).get("_quantfix_owners")
    if known is None:
        loose = {id(parameter) for parameter in group.parameters if backend_of(parameter)}
        loose -= {id(parameter) for module in group.modules for parameter in module.parameters()}
        known = group._quantfix_owners = [
            module
            for module in (group.offload_leader.modules() if loose else ())
            if any(id(parameter) in loose for parameter in module._parameters.values())
        ]
    return known


def backends(group: Any) -> frozenset[str]:
    """The packages of which ``group`` holds weights."""
    known: frozenset[str] | None = vars(group).get("_quantfix_backends")
    if known is None:
        found = {backend_of(tensor) for tensor in _tensors(group)} - {""}
        known = group._quantfix_backends = frozenset(found)
    return known


def identity(tensor: Any) -> tuple[Any, ...]:
    """Equal for tensors that share their memory; CB of an 8-bit layer is its weight, and must stay it."""
    address = tensor.data_ptr()
    if not address:  # an empty one
        return (id(tensor),)
    return address, tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _is_the_same(one: Any, other: Any) -> bool:
    """Whether two tensors at one address have the same `identity`."""
    return bool(
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
    )


class ByMemory:
    """Tensors by the tensors that they stand for: another tensor of the same `identity` finds the same one.

    An address is compared first; a tuple for each of thousands of tensors would take longer than to move some of them.
    """

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Any, Any]] = {}

    def get(self, tensor: Any) -> Any:
        known = self._found.get(tensor.data_ptr())
        if known is None:
            return None
        if known[0] is tensor or _is_the_same(known[0], tensor):
            return known[1]
        known = self._found.get(identity(tensor))
        return None if known is None else known[1]

    def put(self, tensor: Any, other: Any) -> None:
        address = tensor.data_ptr()
        if address:  # not an empty one
            self._found[identity(tensor) if address in self._found else address] = tensor, other


# ---------------------------------------------------------------------- wrappers


def _may_be_wrappers(group: Any) -> list[Any]:
    # Those of bitsandbytes are none, and looking for some takes as long as moving them.
    return [] if backends(group) == _NO_WRAPPERS else _tensors(group)


def unpack(group: Any) -> None:
    """Let weights that are packed for a kernel of the CPU be plain ones of quanto, as its own ``.to()`` would.

    That one packs them anew for the kernel of the device, which at each use would cost more than the kernel saves; and
    what is packed for a device can be neither saved nor moved where it waits.
    """
    torch = sys.modules["torch"]
    tensors = _may_be_wrappers(group)
    if not tensors or torch.device(group.onload_device).type == "cpu":
        return
    for tensor in tensors:
        if _is_packed_for_the_cpu(tensor):
            with torch.inference_mode(False), torch.no_grad():
                plain = tensor.weight_qbits_tensor()
            # In place, as everyone has this parameter: the wrapper itself is the same, of size, type and device.
            tensor.__class__ = type(plain)
            del tensor._scale_shift
            vars(tensor).update(vars(plain))


def _is_packed_for_the_cpu(tensor: Any) -> bool:
    if not is_wrapper(tensor):
        return False
    # By its layout and not by its device: those of a GPU, in int32, wait on the CPU too.
    packed: Any = getattr(tensor, "_data", None)
    return (
        type(packed).__name__ == "TinyGemmPackedTensor" and packed._data.dtype == sys.modules["torch"].uint8
    )


def let_wrappers_follow(group: Any) -> None:
    """Let the wrappers, which tell a device of their own, tell that of their inner tensors."""
    for tensor in _may_be_wrappers(group):
        if is_wrapper(tensor):
            follow(tensor)


# ---------------------------------------------------------------------- disk


def is_on_disk(group: Any) -> bool:
    return vars(group).get("offload_to_disk_path") is not None


def refuse_wrappers(group: Any) -> None:
    for tensor in _tensors(group):
        if is_wrapper(tensor):
            raise ValueError(_NOT_TO_DISK.format(type(tensor).__name__))


def companions_of_parameters(group: Any) -> list[tuple[Any, str, Any]]:
    """The companions that are a parameter by another name: (holder, attribute, parameter)."""
    parameters = {identity(parameter.data): parameter for parameter in _tensors(group)}
    found = [one for layer in _layers(group) for one in companions(layer)]
    return [
        (one.holder, one.attribute, parameters[identity(one.tensor)])
        for one in found
        if identity(one.tensor) in parameters
    ]


def rejoin(group: Any) -> None:
    """Let these companions be again what the parameter is, which diffusers has moved."""
    for holder, attribute, parameter in vars(group).get("_quantfix_aliases", ()):
        setattr(holder, attribute, parameter.data)
