"""Group offloading of modules whose weights are more than one tensor.

``ModuleGroup`` of diffusers moves a group by giving each parameter and buffer other ``.data``. Weights of bitsandbytes,
optimum-quanto and torchao do not travel whole that way (`group_tensors` says what they consist of). Groups that hold
such weights are moved here, tensor by tensor; all other groups are left to diffusers.

On a stream, everything is copied from pinned memory, non-blocking, on that stream. What was onloaded and did not change
is not copied back: its host copy takes its place again. Groups that are offloaded to disk are left to diffusers with
their parameters and buffers; companions, a small part of a weight, stay in host memory then.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

import contextlib
import sys

from ..weights.wrappers import follow
from .group_tensors import (
    ByMemory,
    backends,
    companions_of_parameters,
    contents,
    is_on_disk,
    leave_states,
    places,
    refuse_wrappers,
    rejoin,
    unpack,
    wrappers,
)
from .uncompiled import uncompiled, within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["is_left_to_diffusers", "take_over", "version_of"]

# What an 8-bit layer keeps of the outliers of its last input.
_OF_THE_LAST_INPUT = ("subB", "idx")
_AS_IT_IS: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def take_over(draft: Any, module_group: Any, backend: str) -> None:
    """Let ``module_group``, the class ``ModuleGroup``, leave the groups with weights of ``backend`` to this module.

    Args:
        draft: the draft of the fix.
        module_group: the class of diffusers.
        backend: the top-level package of the weights' class: "bitsandbytes", "optimum" or "torchao".
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
                _onload(self, original)

        return uncompiled(onload_)

    def make_offload(original: Any) -> Any:
        original = within(original)

        def offload_(self: Any) -> None:
            if backend not in backends(self):
                original(self)
            else:
                _offload(self, original)

        return uncompiled(offload_)

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
    if group.stream is not None:
        group.stream.synchronize()  # the transfer before this one
    with _moving():
        modules, tensors = contents(group)
        around = wrappers(group, tensors)
        if is_on_disk(group):
            refuse_wrappers(around)
            original(group)
            rejoin(group)
        unpack(group, around)
        try:
            with _without_subclasses():
                _bring(group, places(group, modules, tensors))
        finally:
            for wrapper in around:
                follow(wrapper)


def _bring(group: Any, found: list[tuple[Any, str, bool]]) -> None:
    """Move the tensors of ``group`` to its device, and remember their host copies until they are offloaded.

    A group can be on its device already: a cache skips a block that was prefetched, or an exception ended the pass. It
    keeps the host copies that it has.
    """
    device = _with_index(group.onload_device)
    offload_device = _with_index(group.offload_device)
    # Remembered from the start, so that a transfer that ends midway can be continued.
    brought, versions = vars(group).setdefault("_quantfix_brought", (ByMemory(), {}))
    moved = ByMemory()
    with _on_its_stream(group) as compute_stream:
        for holder, attribute, quantized in found:
            present = getattr(holder, attribute)
            where = present.device
            if where == device:
                continue
            tensor = moved.get(present)
            if tensor is None:
                with _like(present):
                    pinned = group.stream is None or present.is_pinned() or not present.is_cpu
                    source = present if pinned else present.pin_memory()
                    tensor = source.to(device, non_blocking=group.non_blocking)
                moved.put(present, tensor)
                if compute_stream is not None:
                    tensor.record_stream(compute_stream)
                if where == offload_device:
                    brought.put(tensor, present)
            setattr(holder, attribute, tensor)
            if not quantized:
                versions[id(holder)] = version_of(holder)


def _offload(group: Any, original: Any) -> None:
    torch = sys.modules["torch"]
    if group.stream is not None and not group.record_stream:
        onload_device = torch.device(group.onload_device)
        getattr(torch, onload_device.type).current_stream(onload_device).synchronize()
    training = torch.is_grad_enabled()
    with _moving():
        modules, tensors = contents(group)
        if training and "_quantfix_brought" in vars(group):
            leave_states(group, modules)
        around = wrappers(group, tensors)
        if is_on_disk(group):
            refuse_wrappers(around)
            group._quantfix_aliases = companions_of_parameters(group)
            original(group)
            rejoin(group)
        unpack(group, around)  # what is pinned below has to be what travels
        try:
            with _without_subclasses():
                _take_back(group, places(group, modules, tensors), training)
        finally:
            for wrapper in around:
                follow(wrapper)
    vars(group).pop("_quantfix_brought", None)


def _take_back(group: Any, found: list[tuple[Any, str, bool]], training: bool) -> None:
    """Give every tensor of ``group`` its host copy back, and copy what changed or has none.

    Args:
        training: whether gradients are computed. Writing to ``.data`` is not counted as a change, so parameters that
            are not quantized are copied then.
    """
    device = _with_index(group.offload_device)
    brought, versions = vars(group).get("_quantfix_brought") or (ByMemory(), {})
    pin = group.stream is not None and not group.low_cpu_mem_usage and device.type == "cpu"
    copies = ByMemory()
    for holder, attribute, quantized in found:
        tensor = getattr(holder, attribute)
        if attribute in _OF_THE_LAST_INPUT and not training:
            setattr(holder, attribute, None)
            continue
        host = None
        if quantized or (not training and _is_unchanged(holder, versions)):
            host = brought.get(tensor)
        if host is None:
            host = copies.get(tensor)
        if host is None:
            with _like(tensor):
                host = tensor if tensor.device == device else tensor.to(device)
                if pin and not host.is_pinned():
                    host = host.pin_memory()
            copies.put(tensor, host)
        if host is not tensor:
            setattr(holder, attribute, host)


def _moving() -> contextlib.AbstractContextManager[Any]:
    """A block without inference mode and without gradients; where there are neither, it has nothing to do."""
    torch = sys.modules["torch"]
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _without_modes()
    return _AS_IT_IS


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    torch = sys.modules["torch"]
    with torch.inference_mode(False), torch.no_grad():
        yield


def _without_subclasses() -> Any:
    """A block in which ``.data`` and ``.device`` are those of every tensor: Params4bit takes five times as long."""
    return sys.modules["torch"]._C.DisableTorchFunctionSubclass()


def _on_its_stream(group: Any) -> contextlib.AbstractContextManager[Any]:
    """Run the block on the stream of ``group``; gives the computing stream, if its use has to be recorded."""
    return _AS_IT_IS if group.stream is None else _on_stream(group)


@contextlib.contextmanager
def _on_stream(group: Any) -> Iterator[Any]:
    device = sys.modules["torch"].device(group.onload_device)
    accelerator = getattr(sys.modules["torch"], device.type)
    computing = accelerator.current_stream(device) if group.record_stream else None
    with accelerator.stream(group.stream):
        yield computing


def _with_index(device: Any) -> Any:
    """``device`` as tensors on it report it: ``torch.device("cuda")`` is ``cuda:0`` there, or the current device."""
    torch = sys.modules["torch"]
    device = torch.device(device)
    if device.index is not None or device.type == "cpu":
        return device
    return torch.empty(0, device=device).device


def _like(tensor: Any) -> Any:
    """A block in which new tensors are of the kind of ``tensor``: of inference mode or not.

    A parameter that is given data of the other kind cannot be viewed, or not be differentiated, for good.
    """
    # Not in inference mode until here; to say so once more takes longer than a small copy.
    return sys.modules["torch"].inference_mode() if tensor.is_inference() else _AS_IT_IS


def _is_unchanged(holder: Any, versions: dict[int, int | None]) -> bool:
    """Whether ``holder`` was not changed in place since it was onloaded; False where that is not counted."""
    version = version_of(holder)
    return version is not None and versions.get(id(holder)) == version


def version_of(tensor: Any) -> int | None:
    """How often ``tensor`` was changed in place, None where that is not counted."""
    if tensor.is_inference():  # also a normal one that was given such data: its number stays what it was
        return None
    try:
        version: int = tensor._version
    except RuntimeError:
        return None
    return version
