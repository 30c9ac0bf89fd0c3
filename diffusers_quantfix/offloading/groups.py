"""Group offloading of modules whose weights are more than one tensor.

``ModuleGroup`` of diffusers moves a group by giving each parameter and buffer other ``.data``. Three kinds of weights
do not travel whole that way: those of bitsandbytes have companions (quant state, CB, SCB) that are no parameters, and
those of optimum-quanto and torchao are wrappers around inner tensors, of which ``.data`` exchanges the wrapper only.
Groups that hold such weights are moved here, tensor by tensor; all other groups are left to diffusers.

Weights that quanto has packed for a kernel of the CPU are unpacked first, for good: no other device reads them.

On a stream, everything is copied from pinned memory, non-blocking, on that stream. What was brought and did not change
is not copied back: its host copy takes its place again. Groups that are offloaded to disk are left to diffusers with
their parameters and buffers; companions, a small part of a weight, stay in host memory then.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

import contextlib
import sys

from ..weights.companions import companions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["is_left_to_diffusers", "take_over"]

_BACKENDS = ("bitsandbytes", "optimum", "torchao")
# What an 8-bit layer keeps of the outliers of its last input.
_OF_THE_LAST_INPUT = ("subB", "idx")
_NOT_TO_DISK = (
    "Weights of class {} cannot be offloaded to disk: safetensors does not store their inner tensors. "
    "Offload them to memory, without `offload_to_disk_path`."
)
_known_types: dict[type, str] = {}


def take_over(draft: Any, module_group: Any, backend: str) -> None:
    """Let ``module_group``, the class ``ModuleGroup``, leave the groups with weights of ``backend`` to this module.

    Args:
        draft: the draft of the fix.
        module_group: the class of diffusers.
        backend: the top-level package of the weights' class: "bitsandbytes", "optimum" or "torchao".
    """
    disable = sys.modules["torch"].compiler.disable

    def make_copies(original: Any) -> Any:
        def _init_cpu_param_dict(self: Any) -> Any:
            return {} if backend in _backends(self) else original(self)

        return _init_cpu_param_dict

    def make_onload(original: Any) -> Any:
        def onload_(self: Any) -> None:
            if backend not in _backends(self):
                original(self)
            else:
                _onload(self, original)

        return disable(onload_)

    def make_offload(original: Any) -> Any:
        def offload_(self: Any) -> None:
            if backend not in _backends(self):
                original(self)
            else:
                _offload(self, original)

        return disable(offload_)

    draft.wrap_plain(module_group, "_init_cpu_param_dict", make_copies)
    draft.wrap_plain(module_group, "onload_", make_onload)
    draft.wrap_plain(module_group, "offload_", make_offload)


def is_left_to_diffusers(module_group: Any, backend: str) -> bool:
    """Whether ``module_group`` itself would move a group that holds weights of ``backend``; for probes.

    Nothing is moved, and the backend is not needed: a group is asked for its host copies, which this module, where it
    has taken over, does not let diffusers make.
    """
    torch = sys.modules["torch"]
    group: Any = module_group.__new__(module_group)
    group.modules, group.buffers, group.parameters = [], [], [torch.nn.Parameter(torch.zeros(1))]
    group.stream, group.low_cpu_mem_usage = True, True
    group._quantfix_backends = frozenset((backend,))
    return bool(group._init_cpu_param_dict())


# ---------------------------------------------------------------------- moving


def _onload(group: Any, original: Any) -> None:
    torch = sys.modules["torch"]
    device = torch.device(group.onload_device)
    if group.stream is not None:
        group.stream.synchronize()  # the transfer before this one
    if _is_on_disk(group):
        _refuse_wrappers(group)
        original(group)
        _rejoin(group)
    _unpack(group)
    brought: dict[Any, Any] = {}
    versions = {}
    moved: dict[Any, Any] = {}
    with _on_its_stream(group) as compute_stream:
        for holder, attribute, _ in _places(group):
            host = getattr(holder, attribute)
            if host.device == device:
                continue
            identity = _identity(host)
            tensor = moved.get(identity)
            if tensor is None:
                source = host if group.stream is None or host.is_pinned() else host.pin_memory()
                tensor = moved[identity] = source.to(device, non_blocking=group.non_blocking)
                if compute_stream is not None:
                    tensor.record_stream(compute_stream)
                brought[_identity(tensor)] = tensor, host
            setattr(holder, attribute, tensor)
            if attribute == "data":
                versions[id(holder)] = _version(holder)
    _let_wrappers_follow(group)
    group._quantfix_brought = brought, versions


def _offload(group: Any, original: Any) -> None:
    torch = sys.modules["torch"]
    device = torch.device(group.offload_device)
    if group.stream is not None and not group.record_stream:
        onload_device = torch.device(group.onload_device)
        getattr(torch, onload_device.type).current_stream(onload_device).synchronize()
    brought, versions = vars(group).pop("_quantfix_brought", ({}, {}))
    if _is_on_disk(group):
        _refuse_wrappers(group)
        group._quantfix_aliases = _aliases(group)
        original(group)
        _rejoin(group)
    _unpack(group)  # what is pinned below has to be what travels
    pin = group.stream is not None and not group.low_cpu_mem_usage and device.type == "cpu"
    copies: dict[Any, Any] = {}
    for holder, attribute, quantized in _places(group):
        tensor = getattr(holder, attribute)
        if attribute in _OF_THE_LAST_INPUT and not torch.is_grad_enabled():
            setattr(holder, attribute, None)
            continue
        identity = _identity(tensor)
        host = brought.get(identity, (None, None))[1]
        # Of the others, what is written to ``.data`` is not counted: who trains gets them copied back.
        if not (quantized or (not torch.is_grad_enabled() and versions.get(id(holder)) == _version(holder))):
            host = None
        if host is None:
            host = copies.get(identity)
        if host is None:
            host = tensor if tensor.device == device else tensor.to(device)
            if pin and not host.is_pinned():
                host = host.pin_memory()
            copies[identity] = host
        if host is not tensor:
            setattr(holder, attribute, host)
    _let_wrappers_follow(group)


@contextlib.contextmanager
def _on_its_stream(group: Any) -> Iterator[Any]:
    """Run the block on the stream of ``group``; gives the computing stream, if its use has to be recorded."""
    if group.stream is None:
        yield None
        return
    device = sys.modules["torch"].device(group.onload_device)
    accelerator = getattr(sys.modules["torch"], device.type)
    computing = accelerator.current_stream(device)
    with accelerator.stream(group.stream):
        yield computing if group.record_stream else None


def _identity(tensor: Any) -> tuple[Any, ...]:
    """Equal for tensors that share their memory; CB of an 8-bit layer is its weight, and must stay it."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _version(tensor: Any) -> int | None:
    """How often ``tensor`` was changed in place, None where that is not counted."""
    return None if tensor.is_inference() else tensor._version


# ---------------------------------------------------------------------- what has to travel


def _places(group: Any) -> Iterator[tuple[Any, str, bool]]:
    """Yield where a tensor stands that has to travel: its holder, the attribute, whether it is a quantized weight's."""
    on_disk = _is_on_disk(group)
    if not on_disk:
        for tensor in _tensors(group):
            yield from _inside(tensor)
    aliases = {(id(holder), name) for holder, name, _ in vars(group).get("_quantfix_aliases", ())}
    for layer in _layers(group):
        for found in companions(layer):
            if not on_disk or (id(found.holder), found.attribute) not in aliases:
                yield found.holder, found.attribute, True


def _inside(tensor: Any) -> Iterator[tuple[Any, str, bool]]:
    if not _is_wrapper(tensor):
        yield tensor, "data", _backend_of(tensor) != ""
        return
    for name, inner in _inner_tensors(tensor):
        if _is_wrapper(inner):
            yield from _inside(inner)
        else:
            yield tensor, name, True


def _tensors(group: Any) -> list[Any]:
    """The parameters and buffers of ``group``, each once."""
    found = [*group.parameters, *group.buffers]
    for module in group.modules:
        found.extend(module.parameters())
        found.extend(module.buffers())
    return list({id(tensor): tensor for tensor in found}.values())


def _layers(group: Any) -> Iterator[Any]:
    """The modules that own the parameters of ``group``."""
    for module in group.modules:
        yield from module.modules()
    yield from _owners(group)


def _owners(group: Any) -> list[Any]:
    """The modules whose parameters ``group`` has without having them."""
    known: list[Any] | None = vars(group).get("_quantfix_owners")
    if known is None:
        loose = {id(parameter) for parameter in group.parameters if _backend_of(parameter)}
        loose -= {id(parameter) for module in group.modules for parameter in module.parameters()}
        known = group._quantfix_owners = [
            module
            for module in (group.offload_leader.modules() if loose else ())
            if any(id(parameter) in loose for parameter in module._parameters.values())
        ]
    return known


def _backends(group: Any) -> frozenset[str]:
    """The packages of which ``group`` holds weights."""
    known: frozenset[str] | None = vars(group).get("_quantfix_backends")
    if known is None:
        found = {_backend_of(tensor) for tensor in _tensors(group)} - {""}
        known = group._quantfix_backends = frozenset(found)
    return known


def _backend_of(tensor: Any) -> str:
    """The package of the class of a quantized weight; empty for every other tensor."""
    kind = type(tensor)
    known = _known_types.get(kind)
    if known is None:
        packages = [cls.__module__.partition(".")[0] for cls in kind.__mro__]
        known = _known_types[kind] = next((name for name in packages if name in _BACKENDS), "")
    return known


# ---------------------------------------------------------------------- wrappers


def _is_wrapper(tensor: Any) -> bool:
    return _backend_of(tensor) != "" and hasattr(tensor, "__tensor_flatten__")


def _inner_tensors(wrapper: Any) -> list[tuple[str, Any]]:
    found = [(name, getattr(wrapper, name)) for name in wrapper.__tensor_flatten__()[0]]
    return [(name, inner) for name, inner in found if inner is not None]


def _unpack(group: Any) -> None:
    """Let weights that are packed for a kernel of the CPU be plain ones of quanto, as its own ``.to()`` would.

    That one packs them anew for the kernel of the device, which at each use would cost more than the kernel saves; and
    what is packed for a device can be neither saved nor moved where it waits.
    """
    torch = sys.modules["torch"]
    if torch.device(group.onload_device).type == "cpu":
        return
    for tensor in _tensors(group):
        if _is_packed_for_the_cpu(tensor):
            with torch.inference_mode(False), torch.no_grad():
                plain = tensor.weight_qbits_tensor()
            # In place, as everyone has this parameter: the wrapper itself is the same, of size, type and device.
            tensor.__class__ = type(plain)
            del tensor._scale_shift
            vars(tensor).update(vars(plain))


def _is_packed_for_the_cpu(tensor: Any) -> bool:
    if not _is_wrapper(tensor):
        return False
    # By its layout and not by its device: those of a GPU, in int32, wait on the CPU too.
    packed: Any = getattr(tensor, "_data", None)
    return (
        type(packed).__name__ == "TinyGemmPackedTensor" and packed._data.dtype == sys.modules["torch"].uint8
    )


def _let_wrappers_follow(group: Any) -> None:
    """Let the wrappers, which tell a device of their own, tell that of their inner tensors."""
    for tensor in _tensors(group):
        if _is_wrapper(tensor):
            _follow(tensor)


def _follow(wrapper: Any) -> None:
    inner = [tensor for _, tensor in _inner_tensors(wrapper)]
    for tensor in inner:
        if _is_wrapper(tensor):
            _follow(tensor)
    if inner and wrapper.device != inner[0].device:
        # A shell without inner tensors: its class may refuse to be built on a CPU, where its kernel does not run.
        # Not in inference mode: there the class itself is asked whether it takes other data, and reads the shell.
        with sys.modules["torch"].inference_mode(False):
            wrapper.data = sys.modules["torch"].Tensor._make_wrapper_subclass(
                type(wrapper),
                wrapper.size(),
                strides=wrapper.stride(),
                storage_offset=wrapper.storage_offset(),
                dtype=wrapper.dtype,
                device=inner[0].device,
            )


# ---------------------------------------------------------------------- disk


def _is_on_disk(group: Any) -> bool:
    return vars(group).get("offload_to_disk_path") is not None


def _refuse_wrappers(group: Any) -> None:
    for tensor in _tensors(group):
        if _is_wrapper(tensor):
            raise ValueError(_NOT_TO_DISK.format(type(tensor).__name__))


def _aliases(group: Any) -> list[tuple[Any, str, Any]]:
    """The companions that are a parameter by another name: (holder, attribute, parameter)."""
    parameters = {_identity(parameter.data): parameter for parameter in _tensors(group)}
    found = [one for layer in _layers(group) for one in companions(layer)]
    return [
        (one.holder, one.attribute, parameters[_identity(one.tensor)])
        for one in found
        if _identity(one.tensor) in parameters
    ]


def _rejoin(group: Any) -> None:
    """Let these companions be again what the parameter is, which diffusers has moved."""
    for holder, attribute, parameter in vars(group).get("_quantfix_aliases", ()):
        setattr(holder, attribute, parameter.data)
