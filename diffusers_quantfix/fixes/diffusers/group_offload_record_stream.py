"""Group offloading with ``record_stream`` records the copy stream, not the compute stream.

Symptom: garbled images under ``enable_group_offload(use_stream=True, record_stream=True)``.
Cause: ``ModuleGroup._transfer_tensor_to_device`` queries the current stream when that is the transfer stream, which
    owns the memory anyway. With ``record_stream`` the host does not wait before it frees a group, so the next transfer
    may overwrite memory that the compute stream still reads.
Upstream: https://github.com/huggingface/diffusers/issues/12673; https://github.com/huggingface/diffusers/pull/12721, in
    0.36.0.
Patch: a group's memory is also recorded for the compute stream.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...offloading.live import moved_groups as in_use  # noqa: F401
from ...offloading.transfers import compute_stream

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-record-stream",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.35.0,<0.36.0"},
    harm="wrong result",
    frames=("record_stream", "group_offload"),
    fixed_in="diffusers 0.36.0",
    hot=True,
)

_MARK = "_quantfix_records_the_compute_stream"
_ONLOAD = "_onload_from_memory"


def broken(group_offloading: ModuleType) -> bool:
    """Does the method that copies one tensor query the current stream, which is the transfer stream by then?"""
    group = resolve(group_offloading, "ModuleGroup")
    names = names_used(resolve(group, "_transfer_tensor_to_device"))
    return {"record_stream", "current_stream"} <= names and not hasattr(resolve(group, _ONLOAD), _MARK)


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    def make(original):
        def _onload_from_memory(self):
            original(self)
            if self.record_stream:
                computing = compute_stream(self)
                for tensor in self.cpu_param_dict:
                    tensor.data.record_stream(computing)

        setattr(_onload_from_memory, _MARK, True)
        return _onload_from_memory

    draft.wrap_plain(resolve(group_offloading, "ModuleGroup"), _ONLOAD, make)
