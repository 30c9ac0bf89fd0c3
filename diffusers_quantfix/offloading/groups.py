"""Group offloading of modules whose weights are more than one tensor.

diffusers' ``ModuleGroup`` moves a group by assigning the ``.data`` of each parameter and buffer. That does not move
bitsandbytes, optimum-quanto and torchao weights completely (see `group_tensors`). Groups with such weights are moved
here, tensor by tensor; all other groups are left to diffusers.

With a stream, every copy is from pinned memory, non-blocking, on that stream. Unchanged tensors are not copied back:
their host copies are used again. Groups on disk (`disk`) are moved here too, whatever their weights are; their
companions, a small part of a weight, stay in host memory.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

import contextlib
import sys

from ..weights.wrappers import follow
from .disk import check_file, is_mapped
from .group_tensors import (
    backends,
    companions_of_parameters,
    contents,
    is_on_disk,
    refuse_wrappers,
    rejoin,
    renew_states,
    wrappers,
)
from .inventory import INVENTORY, has_inventory, inventory_of, is_onloaded
from .replaced import follows_data, renew_host_copies
from .transfers import accelerator, compute_stream, end_transfer, forget, is_in_use, is_prefetch
from .uncompiled import uncompiled, within
from .writes import changed_slots, note_versions, versions_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .inventory import Inventory, Look

__all__ = [
    "is_left_to_diffusers",
    "offload",
    "offload_between_passes",
    "offload_unused",
    "onload",
    "take_over",
]

_AS_IT_IS: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def take_over(draft: Any, module_group: Any, backend: str) -> None:
    """Patch ``ModuleGroup`` so that this module moves the groups with weights of ``backend``.

    Args:
        draft: the draft of the fix.
        module_group: the class ``ModuleGroup`` of diffusers.
        backend: one of `diffusers_quantfix.weights.wrappers.BACKENDS`.
    """

    def make_copies(original: Any) -> Any:
        def _init_cpu_param_dict(self: Any) -> Any:
            return {} if backend in backends(self) else original(self)

        return _init_cpu_param_dict

    def make_onload(original: Any) -> Any:
        original = within(original)

        def onload_(self: Any) -> None:
            if backend not in backends(self):
                original(self)
            else:
                onload(self, original)

        return uncompiled(onload_)

    def make_offload(original: Any) -> Any:
        original = within(original)

        def offload_(self: Any) -> None:
            if backend not in backends(self):
                original(self)
            else:
                offload(self, original)

        return uncompiled(offload_)

    draft.wrap_plain(module_group, "_init_cpu_param_dict", make_copies)
    draft.wrap_plain(module_group, "onload_", make_onload)
    draft.wrap_plain(module_group, "offload_", make_offload)


def is_left_to_diffusers(module_group: Any, backend: str) -> bool:
    """Whether ``module_group`` itself would move a group that holds weights of ``backend``; for probes.

    Nothing is moved, and the backend need not be installed: the probe asks a group for its host copies, which diffusers
    does not make once this module has taken over.
    """
    torch = sys.modules["torch"]
    group: Any = module_group.__new__(module_group)
    group.modules, group.buffers, group.parameters = [], [], [torch.nn.Parameter(torch.zeros(1))]
    group.stream, group.low_cpu_mem_usage = True, True
    group._quantfix_backends = frozenset((backend,))
    return bool(group._init_cpu_param_dict())


# ---------------------------------------------------------------------- moving


def onload(group: Any, original: Any = None) -> None:
    """Move ``group`` to its onload device.

    Args:
        group: the ``ModuleGroup``.
        original: diffusers' method, for groups that diffusers offloads to disk.
    """
    if is_mapped(group):
        check_file(group)
    if group.stream is not None:
        group.stream.synchronize()  # the transfer before this one
    _without_modes(_onload, group, original)


def _onload(group: Any, original: Any) -> None:
    on_disk = is_on_disk(group)
    if on_disk:
        _without_wrappers(group)
        original(group)
        rejoin(group)
    inventory, look = inventory_of(group, dropping=False)
    if is_prefetch(group) and not on_disk:
        with _without_subclasses():
            copies, noted = _copies(group, inventory, look), versions_of(look)
        end_transfer(group, lambda: _without_modes(_use, group, inventory, copies, noted))
    else:
        _fetch(group, inventory, look)


def _use(group: Any, inventory: Inventory, copies: list[Any], noted: list[int | None]) -> None:
    """Put ``copies`` into ``group`` if its tensors are still those that were copied, else fetch again."""
    found, look = inventory_of(group, dropping=False)
    with _without_subclasses():
        is_written = found is not inventory or versions_of(look) != noted
    if is_written:
        group.stream.wait_stream(compute_stream(group))  # which may be writing it
    _fetch(group, found, look, None if is_written else copies)


def _fetch(group: Any, inventory: Inventory, look: Look, copies: list[Any] | None = None) -> None:
    try:
        with _without_subclasses():
            if copies is None:
                copies = _copies(group, inventory, look)
                if group.stream is not None:
                    end_transfer(group)
            _put_onto_device(group, inventory, look, copies)
    except BaseException:
        if group.stream is not None:
            group.stream.synchronize()  # nothing else waits for what is in the model by now
        _all_follow(look)
        raise


def _copies(group: Any, inventory: Inventory, look: Look) -> list[Any]:
    """The tensors of ``group`` on its onload device, by slot; tensors already there are returned as they are."""
    device, non_blocking = _with_index(group.onload_device), group.non_blocking
    if group.stream is None:
        return [
            present if present.device == device else _sent(present, device, non_blocking)
            for present in look.tensors
        ]
    pinned, moved = inventory.pinned, list(look.tensors)
    computing = compute_stream(group) if group.record_stream else None
    with _on_its_stream(group, inventory):
        for slot, present in enumerate(look.tensors):
            if present.device == device:
                continue
            if pinned[slot] is None:
                pinned[slot] = not _can_be_pinned(present)
            moved[slot] = _sent(present, device, non_blocking, pin=not pinned[slot])
            if computing is not None:
                moved[slot].record_stream(computing)
    return moved


def _sent(tensor: Any, device: Any, non_blocking: bool, pin: bool = False) -> Any:
    """``tensor`` on ``device``, by way of pinned memory if ``pin``."""
    if tensor.is_inference():
        with _like(tensor):
            return (_pinned(tensor) if pin else tensor).to(device, non_blocking=non_blocking)
    return (_pinned(tensor) if pin else tensor).to(device, non_blocking=non_blocking)


def _put_onto_device(group: Any, inventory: Inventory, look: Look, moved: list[Any]) -> None:
    """Put ``moved``, the result of `_copies`, into ``group``, and keep its host copies until it is offloaded.

    After an exception in a forward pass, a group may be on its device already. It keeps its existing host copies.
    """
    device = _with_index(group.onload_device)
    offload_device = _offload_device(group)
    hosts = list(inventory.hosts)
    if offload_device != device:
        for slot, present in enumerate(look.tensors):
            if present.device == offload_device and _is_strided(present):
                hosts[slot] = present
    # Recorded first, so that an interrupted exchange can be completed.
    inventory.hosts, inventory.onloaded = hosts, moved
    inventory.exchange(look, moved, device)
    if inventory.plain:
        note_versions(inventory, look, moved)


def offload(group: Any, original: Any = None) -> None:
    """Move ``group`` to its offload device, or to disk; arguments as for `onload`."""
    if group.stream is not None:
        if not is_onloaded(group) and forget(group):
            return
        if not group.record_stream:
            compute_stream(group).synchronize()
    _without_modes(_offload, group, original, sys.modules["torch"].is_grad_enabled())


def _offload(group: Any, original: Any, training: bool) -> None:
    if training and is_onloaded(group):
        renew_states(group, contents(group)[0])
    if is_on_disk(group):
        _without_wrappers(group)
        group._quantfix_aliases = companions_of_parameters(group)
        original(group)
        rejoin(group)
    inventory, look = inventory_of(group, dropping=not training)
    try:
        with _without_subclasses():
            _put_back(group, inventory, look, training)
    except BaseException:
        _all_follow(look)
        raise


def offload_unused(group: Any) -> None:
    """Offload ``group``, or drop its copies, if it was prefetched for a layer that does not run."""
    if not forget(group) or is_in_use(group):
        offload_between_passes(group)


def offload_between_passes(group: Any) -> None:
    """Offload ``group``; if it has stayed on its device after a pass, with what the program has written there since."""
    if has_inventory(group):
        vars(group)[INVENTORY].versions.clear()
    elif follows_data(group) and group.stream is not None and group.cpu_param_dict:
        renew_host_copies(group)
    group.offload_()


def _put_back(group: Any, inventory: Inventory, look: Look, training: bool) -> None:
    """Put the host copies back into ``group``, and copy the tensors that changed or have none.

    Args:
        group: the ``ModuleGroup``.
        inventory: its inventory.
        look: its present state.
        training: whether gradients are computed. Parameters that are not quantized are copied then, since a write to
            ``.data`` is not counted.
    """
    device = _offload_device(group)
    mapped = is_mapped(group)
    pin = group.stream is not None and not group.low_cpu_mem_usage and device.type == "cpu" and not mapped
    kept = list(inventory.hosts)
    changed, versions = changed_slots(inventory, look, training)
    for slot, host in enumerate(kept):
        if host is None or slot in changed:
            taken = _offloaded_copy(look.tensors[slot], device, pin)
            # A mapped tensor that did not change stays on disk.
            if host is None or not mapped or not sys.modules["torch"].equal(taken, host):
                kept[slot] = taken
                inventory.pinned[slot] = True if pin else None
    inventory.exchange(look, kept, device)
    inventory.onloaded, inventory.hosts, inventory.versions = [], [None] * len(kept), {}
    if versions:
        inventory.expect(versions)


def _offloaded_copy(tensor: Any, device: Any, pin: bool) -> Any:
    with _like(tensor):
        host = tensor if tensor.device == device else tensor.to(device)
        return _pinned(host) if pin and _can_be_pinned(host) else host


def _pinned(tensor: Any) -> Any:
    """A copy of ``tensor`` in pinned memory; torch makes none that is expanded."""
    return (tensor.contiguous() if 0 in tensor.stride() else tensor).pin_memory()


def _can_be_pinned(tensor: Any) -> bool:
    return bool(tensor.is_cpu and _is_strided(tensor) and not tensor.is_pinned())


def _is_strided(tensor: Any) -> bool:
    """Whether ``tensor`` is not a sparse one, whose data may be replaced without a trace."""
    return bool(tensor.layout is sys.modules["torch"].strided)


def _all_follow(look: Look) -> None:
    for wrapper in look.wrappers:
        follow(wrapper)


def _without_wrappers(group: Any) -> None:
    refuse_wrappers(wrappers(group, contents(group)[1]))


def _without_modes(move: Callable[..., None], *arguments: Any) -> None:
    """Call ``move`` with inference mode and gradients disabled; no block is entered if they already are."""
    torch = sys.modules["torch"]
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            move(*arguments)
    else:
        move(*arguments)


def _without_subclasses() -> Any:
    """A block in which ``.data`` and ``.device`` are plain attributes; of a Params4bit they take five times as long."""
    return sys.modules["torch"]._C.DisableTorchFunctionSubclass()


def _on_its_stream(group: Any, inventory: Inventory) -> contextlib.AbstractContextManager[Any]:
    """Run the block on the stream of ``group``, which has one."""
    known = inventory.on_stream
    if known is None or known.stream is not group.stream:
        known = accelerator(group).stream(group.stream)
        # Creating one takes as long as five small copies. torch's own can be entered again; others may not.
        if type(known) is getattr(accelerator(group), "StreamContext", None):
            inventory.on_stream = known
    found: contextlib.AbstractContextManager[Any] = known
    return found


def _offload_device(group: Any) -> Any:
    return _with_index("cpu" if is_mapped(group) else group.offload_device)


def _with_index(device: Any) -> Any:
    """``device`` as tensors on it report it: ``torch.device("cuda")`` is ``cuda:0`` there, or the current device."""
    torch = sys.modules["torch"]
    if type(device) is not torch.device:
        device = torch.device(device)
    if device.index is not None or device.type == "cpu":
        return device
    return torch.empty(0, device=device).device


def _like(tensor: Any) -> Any:
    """A block in which new tensors are of the kind of ``tensor``: inference tensors or normal ones.

    A parameter that gets data of the other kind can never be viewed, or differentiated, again.
    """
    # The caller has left inference mode; leaving it once more would take longer than a small copy.
    return sys.modules["torch"].inference_mode() if tensor.is_inference() else _AS_IT_IS
