"""Two models that share layers cannot be group-offloaded with streams.

Symptom: ValueError "Hook with name layer_execution_tracker already exists in the registry. Please use a different name
    or first remove the existing hook and then add a new one." from ``enable_group_offload(use_stream=True)`` of a
    Z-Image ControlNet, or of its pipeline.
Cause: ``ZImageControlNetModel.from_transformer``, which the pipeline calls, shares the transformer's embedders and
    refiners with the ControlNet. The second model's ``LazyPrefetchGroupOffloadingHook`` tracks the order of their calls
    with a second hook of the same name.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L474; not
    reported.
Patch: a layer of two models is tracked for neither: it is not prefetched, and does not prefetch what comes next in
    either of them; it onloads itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-shared-modules",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    patterns=("Hook with name layer_execution_tracker already exists in the registry",),
    frames=("group_offloading.py:initialize_hook", "z_image|ZImage"),
    since="0.1.0",
)

_CLASS = "LazyPrefetchGroupOffloadingHook"
_TRACKER = "layer_execution_tracker"
_FOLLOWED_BY = "_quantfix_followed_by"


def broken(group_offloading: ModuleType) -> bool:
    """Let two of these hooks track the calls of one layer: does the second one refuse?"""
    import torch

    model = torch.nn.Sequential(torch.nn.Identity())
    registry = resolve(group_offloading, "HookRegistry").check_if_exists_or_initialize(model[0])
    hook = resolve(group_offloading, "ModelHook")()
    hook.group = _Group()
    registry.register_hook(hook, "group_offloading")
    try:
        for _ in range(2):
            resolve(group_offloading, _CLASS)().initialize_hook(model)
    except ValueError:
        return True
    return False


class _Group:
    """A hook's group, for the probe."""

    non_blocking = onload_self = True


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    def make(original):
        def initialize_hook(self, module):
            original(self, _Followed(self, module))
            return module

        return initialize_hook

    draft.wrap_plain(resolve(group_offloading, _CLASS), "initialize_hook", make)


class _Followed:
    """A model without the layers whose calls another hook tracks, or has tracked; those are removed from that hook."""

    def __init__(self, follower: Any, module: Any) -> None:
        self._follower = follower
        self._module = module

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        for name, module in self._module.named_modules():
            registry: Any = getattr(module, "_diffusers_hook", None)
            hook = registry and registry.get_hook("group_offloading")
            if not name or hook is None:
                yield name, module
                continue
            before = vars(hook).setdefault(_FOLLOWED_BY, (self._follower, name))
            if before[0] is self._follower:
                yield name, module
            else:
                before[0]._layer_execution_tracker_module_names.discard(before[1])
                registry.remove_hook(_TRACKER, recurse=False)
                hook.next_group, hook.group.onload_self = None, True
