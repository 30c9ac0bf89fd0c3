"""The tensors of a group of diffusers' group offloading whose weights are more than one tensor each.

bitsandbytes weights have companions (quant state, CB, SCB) that are not parameters. optimum-quanto and torchao weights
are wrappers around inner tensors (`diffusers_quantfix.weights.wrappers`). `places` lists every attribute that holds any
tensor of a group.

`unpack` permanently unpacks weights that quanto packed for a CPU kernel, since no other device can read them.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

import sys

from ..weights.companions import companions, holders, replace_states
from ..weights.wrappers import backend_of, inner_places, is_wrapper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

__all__ = [
    "FILE",
    "ByMemory",
    "address_of",
    "backends",
    "companions_of_parameters",
    "contents",
    "forget_backends",
    "identity",
    "is_on_disk",
    "layouts",
    "owners",
    "places",
    "refuse_wrappers",
    "rejoin",
    "renew_states",
    "unpack",
    "wrappers",
]

# The file of a group whose tensors are mappings of it (`disk`).
FILE = "_quantfix_file"
_NO_WRAPPERS = (frozenset(("bitsandbytes",)), frozenset(("gguf",)))
# Backends whose weights are moved like plain parameters: GGUF bytes have no companions.
_PLAIN = ("", "gguf")
_NOT_TO_DISK = (
    "Weights of class {} cannot be offloaded to disk: safetensors does not store their inner tensors. "
    "Offload them to memory, without `offload_to_disk_path`."
)


def places(group: Any, modules: list[Any], tensors: list[Any]) -> list[tuple[Any, str, bool]]:
    """Every place of a tensor that has to move: (holder, attribute, whether it belongs to a quantized weight).

    Args:
        group: the ``ModuleGroup``.
        modules: all of its modules.
        tensors: all of its parameters and buffers; both of `contents`.
    """
    found: list[tuple[Any, str, bool]] = []
    aliases: set[tuple[int, str]] = set()
    if is_on_disk(group):
        aliases = {(id(holder), name) for holder, name, _ in vars(group).get("_quantfix_aliases", ())}
    else:
        for tensor in tensors:
            if is_wrapper(tensor):
                found += [(holder, name, True) for holder, name in inner_places(tensor)]
            else:
                found.append((tensor, "data", backend_of(tensor) not in _PLAIN and _is_packed(tensor)))
    for layer in (*modules, *owners(group)):
        for _, holder, names in holders(layer):
            for name in names:
                if not aliases or (id(holder), name) not in aliases:
                    found.append((holder, name, True))
    return found


def _is_packed(tensor: Any) -> bool:
    """Whether bitsandbytes has quantized ``tensor``; it also has parameters that are floats, for training."""
    return vars(tensor).get("quant_state") is not None or not tensor.is_floating_point()


def contents(group: Any) -> tuple[list[Any], list[Any]]:
    """All modules of ``group``, and all of its parameters and buffers, each once."""
    modules = list(group.modules)
    tensors = [*group.parameters, *group.buffers]
    seen = set(map(id, modules))
    for module in modules:  # Module.modules takes several times as long
        tensors += module._parameters.values()
        tensors += module._buffers.values()
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return modules, list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def owners(group: Any) -> list[Any]:
    """The modules that own loose parameters of ``group`` and are not modules of the group themselves."""
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


def renew_states(group: Any, modules: list[Any]) -> None:
    """Give the layers of ``group`` new state objects with the same tensors, and leave the old ones to autograd.

    bitsandbytes' linear functions keep the quant state, or the state of the 8-bit layer, until the backward pass. That
    object must not follow the layer to another device.

    Args:
        group: the ``ModuleGroup``, on its device.
        modules: all of its modules, of `contents`.
    """
    others: dict[int, tuple[Any, Any]] = {}
    for layer in (*modules, *owners(group)):
        replace_states(layer, others)


def backends(group: Any) -> frozenset[str]:
    """The backends (top-level packages) of the quantized weights in ``group``."""
    known: frozenset[str] | None = vars(group).get("_quantfix_backends")
    if known is None:
        found = {backend_of(tensor) for tensor in contents(group)[1]} - {""}
        known = group._quantfix_backends = frozenset(found)
    return known


def forget_backends(group: Any) -> None:
    """Look the `backends` of ``group`` up again: a weight of another one may have come in."""
    vars(group).pop("_quantfix_backends", None)


def identity(tensor: Any) -> tuple[Any, ...]:
    """Equal for tensors that are the same view of the same memory, as an 8-bit layer's CB and weight are."""
    address = address_of(tensor)
    if not address:
        return (id(tensor),)
    return address, tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def address_of(tensor: Any) -> int:
    """The address of the memory of ``tensor``; 0 for tensors that have none of their own: empty and sparse ones."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


def layouts(tensors: Sequence[Any]) -> list[Any]:
    """What besides the address tells one view of a memory from another, of all ``tensors``.

    Call it with tensor subclasses disabled: uninitialized parameters refuse to tell it.

    Raises:
        RuntimeError: one is sparse.
    """
    # Their ``shape`` is refused anywhere.
    return [(tensor.dtype, tensor.size(), tensor.stride()) for tensor in tensors]


def _is_the_same(one: Any, other: Any) -> bool:
    """Whether two tensors at one address have the same `identity`."""
    return bool(
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
    )


class ByMemory:
    """A map whose keys are tensors: tensors of equal `identity` are the same key.

    The address alone is compared first: building a tuple for each of thousands of tensors takes longer than moving some
    of them.
    """

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Any, Any]] = {}

    def get(self, tensor: Any) -> Any:
        known = self._found.get(address_of(tensor))
        if known is None:
            return None
        if known[0] is tensor or _is_the_same(known[0], tensor):
            return known[1]
        known = self._found.get(identity(tensor))
        return None if known is None else known[1]

    def put(self, tensor: Any, other: Any) -> None:
        address = address_of(tensor)
        if address:
            self._found[identity(tensor) if address in self._found else address] = tensor, other


# ---------------------------------------------------------------------- wrappers


def wrappers(group: Any, tensors: Iterable[Any]) -> list[Any]:
    """The wrappers among ``tensors``, the parameters and buffers of ``group``."""
    # bitsandbytes' and GGUF weights are not wrappers, and the search takes time.
    return [] if backends(group) in _NO_WRAPPERS else [tensor for tensor in tensors if is_wrapper(tensor)]


def unpack(group: Any, found: Iterable[Any]) -> None:
    """Turn the `wrappers` of ``group`` that are packed for a CPU kernel into plain quanto weights, in place.

    Their ``.to()`` would do so too, but pack them again for the device's kernel. At every onload that would cost more
    than the kernel saves, and a weight packed for a device can be neither saved nor moved while it is offloaded.
    """
    torch = sys.modules["torch"]
    if torch.device(group.onload_device).type == "cpu":
        return
    for wrapper in found:
        if _is_packed_for_the_cpu(wrapper):
            with torch.inference_mode(False), torch.no_grad():
                plain = wrapper.weight_qbits_tensor()
            # In place, since others refer to this parameter; size, dtype and device stay the same.
            wrapper.__class__ = type(plain)
            del wrapper._scale_shift
            vars(wrapper).update(vars(plain))


def _is_packed_for_the_cpu(wrapper: Any) -> bool:
    # By dtype, not by device: weights packed for a GPU, in int32, may be offloaded to the CPU.
    packed: Any = getattr(wrapper, "_data", None)
    return (
        type(packed).__name__ == "TinyGemmPackedTensor" and packed._data.dtype == sys.modules["torch"].uint8
    )


# ---------------------------------------------------------------------- disk


def is_on_disk(group: Any) -> bool:
    """Whether diffusers offloads ``group`` to disk, and not this package (`disk.map_to_disk`)."""
    held = vars(group)
    return held.get("offload_to_disk_path") is not None and FILE not in held


def refuse_wrappers(found: Iterable[Any]) -> None:
    for wrapper in found:
        raise ValueError(_NOT_TO_DISK.format(type(wrapper).__name__))


def companions_of_parameters(group: Any) -> list[tuple[Any, str, Any]]:
    """The companions that alias a parameter: (holder, attribute, parameter)."""
    modules, tensors = contents(group)
    parameters = {identity(parameter.data): parameter for parameter in tensors}
    found = [one for layer in (*modules, *owners(group)) for one in companions(layer)]
    return [
        (one.holder, one.attribute, parameters[identity(one.tensor)])
        for one in found
        if identity(one.tensor) in parameters
    ]


def rejoin(group: Any) -> None:
    """Make the `companions_of_parameters` aliases again, after diffusers has moved the parameters."""
    for holder, attribute, parameter in vars(group).get("_quantfix_aliases", ()):
        setattr(holder, attribute, parameter.data)
