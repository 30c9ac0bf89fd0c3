"""Group offloading on a stream computes with weights that are still being copied.

Symptom: NaN or wrong output under ``enable_group_offload(use_stream=True)``: from a MultiControlNet at block level,
    from a model with parameters of its own at leaf level, from every model before diffusers 0.35. After an exception in
    a pass, ``state_dict()`` and ``load_lora_weights`` read weights that have not arrived, and these are lost. Also on a
    device that was current when the groups were set up and is not when they run, as in a thread of its own.
Cause: ``onload_`` starts copies that nothing waits for, unless another ``onload_`` follows: the next layer's, or since
    0.35 the hook's ``stream.synchronize()`` for the last. A model that is a list of blocks has no hook that traces its
    layers, so its groups onload themselves without the wait; in the first pass the model's own tensors are copied
    without blocking, since the tracing skips the name "". A parameter already is the unfinished copy while the layer
    before it runs. What autograd keeps of a group is memory of the transfer stream, which may be reused by the next
    transfer while the backward pass still reads it. ``offload_`` waits for the current stream of the current device.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L366; not
    reported.
Patch: at the end of each transfer an event is recorded, and the compute stream waits for it. Prefetched copies become
    the parameters just before their layer runs. If gradients are enabled, they are recorded for the compute stream.
    Before an offload the host waits for the group's own device.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.counters import version_of, versions
from ...offloading.exchanged_buffers import lacks_buffers
from ...offloading.inventory import has_inventory, onloaded_tensors
from ...offloading.live import moved_groups as in_use  # noqa: F401
from ...offloading.replaced import follows_data, renew_host_copies
from ...offloading.transfers import (
    accelerator,
    compute_stream,
    end_transfer,
    expect_prefetch,
    forget,
    is_in_use,
    is_outdated,
    is_prefetch,
    note_use,
    use_prefetched,
)
from ...offloading.uncompiled import uncompiled, within
from ...weights.wrappers import is_wrapper

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-prefetch",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "accelerate": ""},
    harm="wrong result",
    frames=("group_offload", "use_stream"),
    hot=True,
)

_MARK = "_quantfix_takes_up"


def broken(group_offloading: ModuleType) -> bool:
    """Let a group on a stream onload itself before its layer runs; does nothing wait for its transfer?"""
    import torch

    cls = resolve(group_offloading, "GroupOffloadingHook")
    stream = _Stream()
    group = _Group(torch, stream)
    hook = cls.__new__(cls)
    hook.group, hook.next_group = group, None
    hook.config = type("Config", (), {"exclude_kwargs": None})
    hook.pre_forward(group.onload_leader)
    return not stream.is_waited_for and not hasattr(resolve(cls, "pre_forward"), _MARK)


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    group = resolve(group_offloading, "ModuleGroup")
    hook = resolve(group_offloading, "GroupOffloadingHook")
    before, after = uncompiled(_before), uncompiled(_after)

    def make_onload(original):
        original = within(original)

        def onload_(self):
            # Groups with an inventory are moved by this package.
            if self.stream is None or has_inventory(self):
                original(self)
                return
            try:
                if is_prefetch(self) and (tensors := exchangeable(self)):
                    prefetch(self, tensors, original)
                else:
                    keep_for_interrupted_pass(self, exchangeable(self))
                    original(self)
                    note_use(self, True)
                    end_transfer(self)
            except BaseException:
                self.stream.synchronize()  # nothing else waits for what this has put into the model
                raise

        return uncompiled(onload_)

    def make_offload(original):
        original = within(original)

        def offload_(self):
            if self.stream is None or is_in_use(self) or not forget(self):
                if self.stream is not None and is_elsewhere(self):
                    compute_stream(self).synchronize()  # diffusers waits for the current device
                original(self)
                note_use(self, False)

        return uncompiled(offload_)

    def make_pre_forward(original):
        def pre_forward(self, module, *args, **kwargs):
            group, following = self.group, self.next_group
            if (group.stream is None and following is None) or group.onload_leader not in (None, module):
                return original(self, module, *args, **kwargs)
            before(group, following)
            arguments = original(self, module, *args, **kwargs)
            after(group)
            return arguments

        setattr(pre_forward, _MARK, True)  # other fixes' wrappers around it have it too
        return pre_forward

    def make_deinitialize(original):
        def deinitalize_hook(self, module):
            forget(self.group)
            return original(self, module)

        return deinitalize_hook

    draft.wrap_plain(group, "onload_", make_onload)
    draft.wrap_plain(group, "offload_", make_offload)
    draft.wrap_plain(hook, "pre_forward", make_pre_forward)
    draft.wrap_plain(hook, "deinitalize_hook", make_deinitialize)


def is_elsewhere(group: Any) -> bool:
    """Whether ``group`` computes on a device that is not the current one, as in a thread that never chose it."""
    index = getattr(group.onload_device, "index", None)
    return index is not None and index != accelerator(group).current_device()


def exchangeable(group: Any) -> list[Any]:
    """The parameters and buffers of ``group``; none if assigning ``.data`` would not move all of them whole."""
    tensors = list(group.cpu_param_dict)
    return [] if any(map(is_wrapper, tensors)) else tensors


def prefetch(group: Any, tensors: list[Any], original: Any) -> None:
    """Let diffusers copy ``group`` to its device, and keep the copies aside."""
    # Not always the host copies: a layer that runs twice in a pass can be prefetched while it runs.
    now = [tensor.data for tensor in tensors]
    before = group.cpu_param_dict
    try:
        original(group)
        copies = [tensor.data for tensor in tensors]
    finally:
        for tensor, data in zip(tensors, now, strict=True):
            tensor.data = data
    for tensor, host in group.cpu_param_dict.items() if group.cpu_param_dict is not before else ():
        if tensor not in before and not is_wrapper(tensor):  # it came into the model since
            tensors.append(tensor)
            copies.append(tensor.data)
            tensor.data = host
    noted = versions(tensors)
    # Writes to what was made in inference mode are not counted, nor to what has the data of such a tensor.
    is_uncounted = None in map(version_of, buffers_of(tensors))

    def use() -> None:
        keep_for_interrupted_pass(group, tensors)
        # By the layers before, or a pre-hook.
        is_replaced = follows_data(group) and renew_host_copies(group)
        is_written = is_outdated(group) or is_uncounted or versions(tensors) != noted
        is_written = is_written or lacks_buffers(group)
        if is_written:
            group.stream.wait_stream(compute_stream(group))
        if is_replaced or is_written:
            original(group)
            note_use(group, True)
            end_transfer(group)
            return
        note_use(group, True)
        for tensor, data in zip(tensors, copies, strict=True):
            tensor.data = data

    end_transfer(group, use)


def buffers_of(tensors: list[Any]) -> list[Any]:
    """Those of ``tensors`` that a pass may write to: the blocks before, for one, keep their state there."""
    parameter = sys.modules["torch"].nn.Parameter
    return [tensor for tensor in tensors if not isinstance(tensor, parameter)]


def keep_for_interrupted_pass(group: Any, tensors: list[Any]) -> None:
    """Before ``group``, left on its device by an exception, is onloaded again: the interrupted pass may still read
    it."""
    if is_in_use(group):
        computing = compute_stream(group)
        for tensor in tensors:
            if tensor.device.type != "cpu":
                record(tensor.data, computing)


def _before(group: Any, following: Any) -> None:
    use_prefetched(group)
    if following is None or following is group or following.stream is None:
        return
    # A pre-hook may write to its layer, in ways that torch does not count. It finds the copies there, as without us.
    if not getattr(following.onload_leader, "_forward_pre_hooks", None):
        expect_prefetch(following)


def _after(group: Any) -> None:
    if sys.modules["torch"].is_grad_enabled() and group.stream is not None and not group.record_stream:
        computing = compute_stream(group)
        for tensor in onloaded_tensors(group) or [tensor.data for tensor in exchangeable(group)]:
            record(tensor, computing)


def record(tensor: Any, stream: Any) -> None:
    """``tensor.record_stream(stream)``; of sparse tensors, for which torch has no such thing, nothing."""
    with contextlib.suppress(NotImplementedError):
        tensor.record_stream(stream)


class _Stream:
    """A group's stream, for the probe; it records whether anything waits for it."""

    is_waited_for = False

    def synchronize(self) -> None:
        self.is_waited_for = True


class _Group:
    """What a hook reads from a group, for the probe; it moves nothing."""

    onload_self = non_blocking = True
    record_stream = False
    modules = parameters = ()

    def __init__(self, torch: Any, stream: _Stream) -> None:
        self.stream = stream
        self.onload_device = self.offload_device = torch.device("cpu")
        self.onload_leader = torch.nn.Module()
        self.cpu_param_dict: dict[Any, Any] = {}

    def onload_(self) -> None:
        """It would start copies."""
