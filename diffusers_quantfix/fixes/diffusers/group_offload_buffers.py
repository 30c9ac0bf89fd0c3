"""Group offloading leaves buffers on the GPU.

Symptom: GPU memory is not released after a run under ``enable_group_offload(use_stream=True)``. Every buffer of the
    offloaded modules is still there: the whole model if its quantized weights are buffers (the layouts of GPTQ and
    AutoRound), the scales of Black Forest Labs. What a layer writes to its buffer is lost in the next run. Even without
    a stream, the memory of a buffer that is a view is never freed: transformers 4.51 to 4.56 makes all buffers of a
    quantized model views of what it read. And after a run in inference mode, one outside of it ends with RuntimeError
    "Inference tensors do not track version counter." in a layer that takes a view of its buffer, as rotary embeddings
    do.
Cause: ``ModuleGroup`` onloads the parameters and buffers of its modules, but restores the host copies only of the
    parameters, and of buffers of a module that is not a layer, without what was written to them. The next run onloads a
    buffer's first host copy again. It assigns a buffer's ``.data``, but a view keeps its base, and so the memory of
    both. It offloads modules without a stream by their ``to``, which replaces their buffers: in inference mode by
    tensors without a counter of changes, which they lack wherever their ``.data`` is assigned later.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L321; not
    reported.
Patch: the buffers get their host copies back too; one that was changed in place, which batch normalization in training
    does uncounted, is first copied to its host copy. When a model's offloading is set up, its buffers that are views
    are replaced by plain ones. In inference mode, what replaces a buffer has a counter. What ``forward`` puts into
    a buffer's place, as OmniGen's rotary embedding does it, stays on the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.counters import has_version, version_of
from ...offloading.exchanged_buffers import admit_buffers, has_exchanged, look_up_places
from ...offloading.live import moved_groups as in_use  # noqa: F401
from ...offloading.own_objects import is_plain, normal
from ...offloading.replaced import forget_copies
from ...offloading.transfers import expect_write
from ...offloading.uncompiled import uncompiled, within
from ...offloading.writes import may_be_written

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-buffers",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    harm="memory or time",
    patterns=(r"Inference tensors do not track version counter",),
    frames=("group_offload", "use_stream", "buffer"),
    hot=True,
)

_APPLY = "apply_group_offloading"
_BUFFERS = "_quantfix_buffers"
_MARK = "_quantfix_takes_buffers_back"
_VERSIONS = "_quantfix_buffer_versions"


def broken(group_offloading: ModuleType) -> bool:
    """Do buffers stay on the device, views stay views, or inference tensors replace buffers?"""
    return (
        _keeps_views(group_offloading)
        or _leaves_buffers(group_offloading)
        or _replaces_buffers(group_offloading)
    )


def _keeps_views(group_offloading: ModuleType) -> bool:
    """Set up offloading of a module whose buffer is a view; is it still a view?"""
    import torch

    host = torch.device("cpu")
    module = torch.nn.Module()
    module.register_buffer("buffer", torch.zeros(1).view(1))
    apply = resolve(group_offloading, _APPLY)
    try:
        apply(module, onload_device=host, offload_device=host, offload_type="leaf_level")
    except AttributeError:  # 0.34.0 asks for the accelerator, where there is none
        return not hasattr(resolve(group_offloading, "ModuleGroup").offload_, _MARK)
    return bool(module.buffer._is_view())


def _leaves_buffers(group_offloading: ModuleType) -> bool:
    """Offload a module with one buffer, whose host copy the group has; does the buffer get it?"""
    import torch

    cls = resolve(group_offloading, "ModuleGroup")
    module = torch.nn.Module()
    module.register_buffer("buffer", torch.zeros(1))
    host = torch.zeros(1)
    group = cls.__new__(cls)
    group.modules, group.parameters, group.buffers = [module], [], []
    group.offload_leader, group.stream, group.record_stream = module, object(), True
    group.onload_device = group.offload_device = torch.device("cpu")
    group.offload_to_disk_path, group.cpu_param_dict = None, {module.buffer: host}
    try:
        group.offload_()
    except AttributeError:  # 0.34.0 asks for the accelerator, where there is none
        return not hasattr(cls.offload_, _MARK)
    return bool(module.buffer.data_ptr() != host.data_ptr())


def _replaces_buffers(group_offloading: ModuleType) -> bool:
    """Offload a module, whose ``to`` replaces its buffer, in inference mode; does the new one lack a counter?"""
    import torch

    class Module(torch.nn.Module):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            self._buffers["buffer"] = torch.zeros(1)
            return self

    cls = resolve(group_offloading, "ModuleGroup")
    module = Module()
    module.register_buffer("buffer", torch.zeros(1))
    group = cls.__new__(cls)
    group.modules, group.parameters, group.buffers = [module], [], []
    group.offload_leader, group.stream, group.record_stream = module, None, False
    group.onload_device = group.offload_device = torch.device("cpu")
    group.offload_to_disk_path, group.cpu_param_dict = None, {}
    try:
        with torch.inference_mode():
            group.offload_()
    except AttributeError:  # 0.34.0 asks for the accelerator, where there is none
        return not hasattr(cls.offload_, _MARK)
    return not has_version(module.buffer)


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    import torch

    group = resolve(group_offloading, "ModuleGroup")

    # Groups offloaded to disk, without a stream, or moved by another fix have no host copies.
    def make_onload(original):
        original = within(original)

        def onload_(self):
            if has_exchanged(self):
                admit_buffers(self)
            original(self)
            if not vars(self).get("cpu_param_dict"):
                return
            look_up_places(self)
            if buffers := held_buffers(self):
                setattr(self, _VERSIONS, {id(buffer): version_of(buffer) for buffer in buffers})

        return uncompiled(onload_)

    def make_offload(original):
        original = within(original)

        def offload_(self):
            buffers = held_buffers(self) if vars(self).get("cpu_param_dict") else {}
            if (
                buffers
            ):  # before: diffusers restores the host copies of those that are in no module of the group
                keep_changes(self, buffers)
            counted = counted_buffers(self) if torch.is_inference_mode_enabled() else ()
            original(self)
            for buffer in held_buffers(self) if buffers else {}:  # there may be host copies of others now
                buffer.data = self.cpu_param_dict[buffer]
            count_again(counted)

        wrapped = uncompiled(offload_)
        setattr(wrapped, _MARK, True)  # other fixes' wrappers around it have it too
        return wrapped

    def make_apply(original):
        def apply_group_offloading(module, *args, **kwargs):
            replace_views(module)
            return original(module, *args, **kwargs)

        return apply_group_offloading

    draft.wrap_plain(group_offloading, _APPLY, make_apply)
    draft.wrap_plain(group, "onload_", make_onload)
    draft.wrap_plain(group, "offload_", make_offload)


def replace_views(model: Any) -> None:
    """Replace ``model``'s buffers that are views, which keep their base alive, by plain buffers of the same memory."""
    is_lazy = sys.modules["torch"].nn.parameter.is_lazy
    replaced: dict[int, Any] = {}  # by the identity of a view, which is kept alive: shared ones stay shared
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or is_lazy(buffer):
                continue
            if buffer._is_view() and not buffer.requires_grad:
                module._buffers[name] = replaced.setdefault(id(buffer), (buffer, buffer.data))[1]


def counted_buffers(group: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """The buffers of ``group``'s modules that have a counter of changes, each with its place."""
    return [
        (module._buffers, name, buffer)
        for member in group.modules
        for module in member.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and has_version(buffer)
    ]


def count_again(before: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    """Replace the tensors that others have put into the places of `counted_buffers` by tensors with the same data that
    have a counter; shared ones stay shared. The buffers from before may be the program's, and stay as they are."""
    renewed: dict[int, Any] = {}  # by the identity of a buffer from before
    for places, name, buffer in before:
        new = places[name]
        if new is not buffer and is_plain(new) and is_plain(buffer) and not has_version(new):
            places[name] = renewed.setdefault(id(buffer), normal(new))


def held_buffers(group: Any) -> dict[Any, Any]:
    """The buffers of ``group`` that have host copies -> the module of each."""
    copied: Any
    known: dict[Any, Any]
    copied, known = vars(group).get(_BUFFERS, (None, {}))
    copies = group.cpu_param_dict
    if copied is not copies:
        known = dict.fromkeys((buffer for buffer in group.buffers if buffer in copies), group.offload_leader)
        for member in group.modules:
            for module in member.modules():
                known |= {buffer: module for buffer in module._buffers.values() if buffer in copies}
        setattr(group, _BUFFERS, (copies, known))
    return known


def keep_changes(group: Any, buffers: dict[Any, Any]) -> None:
    """Copy the buffers that were changed in place, or may have been, to their host copies."""
    inference_mode = sys.modules["torch"].inference_mode
    versions = vars(group).pop(_VERSIONS, {})
    for buffer, module in buffers.items():
        if id(buffer) not in versions:
            continue
        known, host = versions[id(buffer)], group.cpu_param_dict[buffer]
        is_other = host.shape != buffer.shape or host.dtype != buffer.dtype
        is_known = not is_other and known is not None and known == version_of(buffer)
        if is_known and not may_be_written(module, buffer):
            continue
        expect_write(group)
        with inference_mode(host.is_inference()):
            if is_other:
                group.cpu_param_dict[buffer] = buffer.data.to(host.device)
                forget_copies(group)
            else:
                host.copy_(buffer)
