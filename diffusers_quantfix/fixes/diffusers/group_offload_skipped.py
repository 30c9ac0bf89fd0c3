"""Group offloading with a stream loses track of layers that a cache skips.

Symptom: PyramidAttentionBroadcast, FasterCache or FirstBlockCache with ``enable_group_offload(use_stream=True)``:
    weights stay on the GPU after a run; so does a layer of the text encoder after a run of ACE-Step, which calls its
    embedding alone. Before diffusers 0.37.1 RuntimeError "Expected all tensors to be on the same
    device" or "Input type and weight type should be the same" in the second step.
Cause: every layer prefetches the group that ran next in the first pass. If that group's layer is then skipped, the
    group is not offloaded, since the layer would do that; and nothing prefetched the layer that runs instead.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py; not reported.
    In diffusers 0.37.1 such a layer onloads its group itself.
Patch: what was prefetched for a layer is remembered. Another layer that runs before it, or the end of the model's
    forward pass, offloads it again; and a layer for which nothing was prefetched onloads its group itself. A layer that
    is called while the model is not running prefetches nothing.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.groups import offload_unused
from ...offloading.live import moved_groups as in_use  # noqa: F401
from ...offloading.transfers import is_waited_for
from ...offloading.uncompiled import uncompiled

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-skipped",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "accelerate": ""},
    harm="memory or time",
    frames=("group_offload", "use_stream", "pyramid.?attention|faster.?cache|first.?block.?cache"),
    hot=True,
    since="0.1.0",
)

# The last prefetched group among those that share a stream: an attribute of that stream.
_FETCHED = "_quantfix_fetched"
_TOP = "_quantfix_is_of_the_model"
# Whether the model whose layers prefetch each other is running; an attribute of its stream, once they were traced.
_RUNS = "_quantfix_model_runs"


def broken(group_offloading: ModuleType) -> bool:
    """Prefetch a group for a layer, and run another layer instead; is the group offloaded again?"""
    import torch

    cls = resolve(group_offloading, "GroupOffloadingHook")
    stream = _Stream()
    first, skipped, last = (_Group(torch, stream) for _ in range(3))
    first.onload_self = True
    _hook(cls, first, skipped).pre_forward(first.onload_leader)
    _hook(cls, last, None).pre_forward(last.onload_leader)
    return "offloaded" not in vars(skipped)


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    hook = resolve(group_offloading, "GroupOffloadingHook")
    lazy = resolve(group_offloading, "LazyPrefetchGroupOffloadingHook")
    before, after = uncompiled(_before), uncompiled(_after)

    def make_pre_forward(original):
        def pre_forward(self, module, *args, **kwargs):
            stream = _stream(self)
            if stream is None or self.group.onload_leader not in (None, module):
                return original(self, module, *args, **kwargs)
            before(self.group, stream)
            if hasattr(self, _TOP):
                setattr(stream, _RUNS, True)
            elif getattr(stream, _RUNS, True) is False:  # a call of the layer alone: no other follows
                return _without_next(self, original, module, args, kwargs)
            arguments = original(self, module, *args, **kwargs)
            if self.next_group is not None and not self.next_group.onload_self:
                setattr(stream, _FETCHED, self.next_group)
            return arguments

        return pre_forward

    def make_post_forward(original):
        def post_forward(self, module, output):
            output = original(self, module, output)
            stream = _stream(self)
            # Before 0.35.0 blocks prefetch each other from the first pass on, without tracing.
            if stream is not None and (hasattr(self, _TOP) or self.group.stream is None):
                after(stream)
            return output

        return post_forward

    def make_traced(original):
        def post_forward(self, module, output):
            output = original(self, module, output)
            top = module._diffusers_hook.get_hook("group_offloading")
            setattr(top, _TOP, True)
            if top.next_group is not None and top.next_group.stream is not None:
                setattr(top.next_group.stream, _RUNS, False)
            return output

        return post_forward

    def make_deinitialize(original):
        def deinitalize_hook(self, module):
            # The stream outlives the group: hooks that are applied again use the same one.
            stream = self.group.stream
            if stream is not None and vars(stream).get(_FETCHED) is self.group:
                delattr(stream, _FETCHED)
            return original(self, module)

        return deinitalize_hook

    draft.wrap_plain(hook, "pre_forward", make_pre_forward)
    draft.wrap_plain(hook, "deinitalize_hook", make_deinitialize)
    draft.wrap_plain(hook, "post_forward", make_post_forward)
    draft.wrap_plain(lazy, "post_forward", make_traced)


def _stream(hook: Any) -> Any:
    """The stream of ``hook``; the group of a model's loose parameters, which prefetches the first group, has none."""
    if hook.group.stream is None and hook.next_group is not None:
        return hook.next_group.stream
    return hook.group.stream


def _before(group: Any, stream: Any) -> None:
    fetched = vars(stream).pop(_FETCHED, None)
    if fetched is group:
        return
    if fetched is not None:
        offload_unused(fetched)
    if not group.onload_self:
        group.onload_()
        if not is_waited_for(group):
            stream.synchronize()


def _without_next(hook: Any, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """``pre_forward`` of ``hook`` without a prefetch."""
    following, hook.next_group = hook.next_group, None
    try:
        return original(hook, module, *args, **kwargs)
    finally:
        hook.next_group = following


def _after(stream: Any) -> None:
    held = vars(stream)
    if _RUNS in held:
        held[_RUNS] = False
    fetched = held.pop(_FETCHED, None)
    if fetched is not None:
        offload_unused(fetched)


class _Stream:
    """The stream of these groups."""

    def synchronize(self) -> None:
        """Nothing runs on it."""


class _Group:
    """What a hook reads from a group, for the probe; it moves nothing."""

    onload_self = non_blocking = False
    record_stream = True
    modules = parameters = ()

    def __init__(self, torch: Any, stream: _Stream) -> None:
        self.stream = stream
        self.onload_device = self.offload_device = torch.device("cpu")
        self.onload_leader = torch.nn.Module()

    def onload_(self) -> None:
        """Nothing to move."""

    def offload_(self) -> None:
        self.offloaded = True


def _hook(cls: Any, group: _Group, following: _Group | None) -> Any:
    hook = cls.__new__(cls)
    hook.group, hook.next_group = group, following
    hook.config = type("Config", (), {"exclude_kwargs": None})
    return hook
