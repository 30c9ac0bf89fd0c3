"""Group offloading with a stream computes with the weights from before.

Symptom: a model under ``enable_group_offload(use_stream=True)`` does not follow what is assigned to its parameters'
    ``.data``: ``fuse_lora(safe_fusing=True)``, ``torch.nn.utils.vector_to_parameters`` and ``enable_layerwise_casting``
    have no effect, silently. After ``pipe.to(torch.bfloat16)`` or ``model.half()``, RuntimeError "mat1 and mat2 must
    have the same dtype, but got BFloat16 and Float", with inputs of the new dtype.
Cause: ``ModuleGroup`` makes host copies of the weights when it is set up. It onloads these, and puts them back when it
    offloads, whatever the parameters hold by then.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L222; not
    reported.
Patch: a group that is about to be onloaded makes new host copies of what was replaced. What replaces a weight while its
    layer runs lasts as long as that, as before.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.inventory import has_inventory
from ...offloading.replaced import MARK, renew_host_copies
from ...offloading.uncompiled import uncompiled, within

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-replaced",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    harm="wrong result",
    frames=("diffusers/hooks/hooks.py:new_forward", "group_offload", "use_stream", "have the same dtype"),
    hot=True,
)


def broken(group_offloading: ModuleType) -> bool:
    """Ask a group what it would onload for a weight whose data was replaced: the host copy from before?"""
    import torch

    cls = resolve(group_offloading, "ModuleGroup")
    if hasattr(resolve(cls, "onload_"), MARK):
        return False
    weight, before = torch.nn.Parameter(torch.zeros(1, device="cpu")), _HostCopy()
    group = cls.__new__(cls)
    group.cpu_param_dict = {weight: before}
    with resolve(cls, "_pinned_memory_tensors")(group) as sources:
        return sources[weight] is before


class _HostCopy:
    """A pinned host copy, for the probe; whether a real one is pinned only a device can tell."""

    def is_pinned(self) -> bool:
        return True


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    def make(original):
        original = within(original)

        def onload_(self: Any) -> None:
            # Groups with an inventory are moved by this package, which compares what they hold.
            if self.stream is not None and self.cpu_param_dict and not has_inventory(self):
                renew_host_copies(self)
            original(self)

        wrapped = uncompiled(onload_)
        setattr(wrapped, MARK, True)  # other fixes' wrappers around it have it too
        return wrapped

    draft.wrap_plain(resolve(group_offloading, "ModuleGroup"), "onload_", make)
