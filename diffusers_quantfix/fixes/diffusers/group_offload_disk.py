"""Weights group-offloaded to disk become uninitialized memory, or another model's weights.

Symptom: ``save_pretrained`` of a model under ``enable_group_offload(offload_to_disk_path=...)`` writes noise, without
    an error; the reloaded model gives NaN. Loading a LoRA at leaf level gives NaN at once, at block level KeyError
    "tensor_32". ``fuse_lora()`` and ``load_lora_weights(hotswap=True)`` have no effect, or give NaN. T5 at leaf level
    gives NaN. Two models in one folder (both transformers of Wan 2.2), or a folder with files left by another model:
    the second computes with the weights of the first. With a stream, before diffusers 0.41, NaN.
Cause: ``ModuleGroup.offload_`` writes its tensors to a file and replaces them with ``torch.empty_like``. Only
    ``onload_`` reads the file. ``state_dict()`` does not, nor does the removal of the hooks, and anything written to
    the weights meanwhile is lost. A second group with the same tensor writes what the first has emptied. The file name
    is made from the group's name only, and any file of that name is assumed to be the group's. Device memory is freed
    while it may still be read.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L314;
    https://github.com/huggingface/diffusers/pull/14657, in 0.41.0, fixes the last.
Patch: the tensors of a group become private mappings of its file, which can be read and changed like other tensors. An
    existing file is used if every byte of it matches the group; a file that the group wrote is deleted with its hook.
    This package then moves the groups, with the same synchronization as for groups in memory.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.interruptions import heed_interruption
from ...engine.probe import resolve
from ...offloading.disk import delete_own_file, is_mapped, map_to_disk
from ...offloading.groups import offload, onload
from ...offloading.live import moved_groups as in_use  # noqa: F401
from ...offloading.uncompiled import uncompiled, within

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-disk",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.34.0,<=0.42.1"},
    harm="wrong result",
    frames=("offload_to_disk_path", "group_offload", "disk"),
    hot=True,
)


def broken(group_offloading: ModuleType) -> bool:
    """Offload a layer whose file is marked as written; does its state dict silently differ from its weights?

    Nothing is written: an upstream release that reads the file would not find it, and this fix cannot write it.
    """
    import torch

    cls = resolve(group_offloading, "ModuleGroup")
    resolve(cls, "offload_")
    layer = torch.nn.Linear(1, 1, bias=False)
    group = cls.__new__(cls)
    group.modules, group.parameters, group.buffers = [layer], [], []
    group.offload_leader, group.stream, group.record_stream = layer, None, False
    group.onload_device = group.offload_device = torch.device("cpu")
    group.offload_to_disk_path = os.devnull
    group.safetensors_file_path = os.path.join(os.devnull, "none.safetensors")
    group._is_offloaded_to_disk = True
    group.cpu_param_dict = {}
    group.tensor_to_key = {layer.weight: "tensor_0"}
    group.key_to_tensor = {"tensor_0": layer.weight}
    before = layer.weight.data_ptr(), layer.weight.data
    try:
        group.offload_()
        state = layer.state_dict()
    except Exception as error:
        heed_interruption(error)
        return False
    return bool(state["weight"].data_ptr() != before[0])


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    group = resolve(group_offloading, "ModuleGroup")
    hook = resolve(group_offloading, "GroupOffloadingHook")

    def make_offload(original):
        original = within(original)

        def offload_(self):
            if not goes_to_disk(self):
                return original(self)
            if not is_mapped(self):
                map_to_disk(self)
            return offload(self)

        return uncompiled(offload_)

    def make_onload(original):
        original = within(original)

        def onload_(self):
            return onload(self) if is_mapped(self) else original(self)

        return uncompiled(onload_)

    def make_deinitialize(original):
        def deinitalize_hook(self, module):
            delete_own_file(self.group)
            return original(self, module)

        return deinitalize_hook

    resolve(hook, "deinitalize_hook")
    draft.wrap_plain(group, "offload_", make_offload)
    draft.wrap_plain(group, "onload_", make_onload)
    draft.wrap_plain(hook, "deinitalize_hook", make_deinitialize)


def goes_to_disk(group: Any) -> bool:
    """Whether it is a group with a file: before diffusers 0.35 the path "" means none."""
    return vars(group).get("safetensors_file_path") is not None
