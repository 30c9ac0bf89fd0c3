"""Group offloading from disk ignores the index of the device.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and
    cuda:1!" under group offloading with ``offload_to_disk_path`` and ``onload_device=torch.device("cuda:1")``, or with
    ``torch.device("cuda")`` while the current GPU is not the first. A 4-bit or 8-bit model passes through the first
    GPU's memory.
Cause: ``ModuleGroup`` lets safetensors load the file to ``onload_device.type``, "cuda", which for safetensors is the
    first GPU. With a stream the device has its index, but groups that diffusers does not put on the stream are loaded
    the same way.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L270; not
    reported.
Patch: while the file is read, ``onload_device`` is a string with the index, which upstream uses as it is.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...offloading.live import moved_groups as in_use  # noqa: F401
from ...offloading.uncompiled import uncompiled, within

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-disk-device",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.34.0,<=0.42.1"},
    patterns=(
        "Expected all tensors to be on the same device, but found at least two devices",
        r"\A(?=.*offload_to_disk_path).*Expected all tensors to be on the same device",
    ),
    frames=("offload_to_disk_path", "diffusers/hooks/hooks.py:new_forward", "enable_group_offload"),
    hot=True,
)

_MARK = "_quantfix_knows_the_index"


def broken(group_offloading: ModuleType) -> bool:
    """Does the method that reads the file use the device's type?"""
    read = resolve(group_offloading, f"ModuleGroup.{reader(group_offloading)}")
    return {"load_file", "type"} <= names_used(read) and not hasattr(read, _MARK)


def patch(group_offloading: ModuleType, draft: Draft) -> None:

    def make(original):
        original = within(original)

        def read(self):
            device = self.onload_device
            if self.offload_to_disk_path is None or self.stream is not None:
                return original(self)
            self.onload_device = with_index(device)
            try:
                return original(self)
            finally:
                self.onload_device = device

        wrapped = uncompiled(read)
        setattr(wrapped, _MARK, True)  # other fixes' wrappers around it have it too
        return wrapped

    draft.wrap_plain(resolve(group_offloading, "ModuleGroup"), reader(group_offloading), make)


def reader(group_offloading: ModuleType) -> str:
    """The method of ``ModuleGroup`` that reads the file: 0.34 has no separate one."""
    return (
        "_onload_from_disk"
        if hasattr(resolve(group_offloading, "ModuleGroup"), "_onload_from_disk")
        else "onload_"
    )


def with_index(device: Any) -> str:
    """The device as a string, "cuda:1"; without an index it is the current one."""
    torch = sys.modules["torch"]
    device = torch.device(device)
    if device.index is None and device.type != "cpu":
        device = torch.empty(0, device=device).device
    return str(device)
