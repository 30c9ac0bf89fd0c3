"""Adapters with factors in a ParameterDict (LoKr, LoHa) cannot run under leaf-level group offloading.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    from a LoKr or LoHa under ``enable_group_offload(offload_type="leaf_level")``.
Cause: a parameter that belongs to no supported layer is onloaded when its parent is called. The parent found by
    ``_find_parent_module_in_module_dict`` is the ``ParameterDict``, which is never called.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py; not reported.
Patch: the parent is the module that owns the ``ParameterDict`` or ``ParameterList``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.containers import is_container

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-containers",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    patterns=(
        r"tuners/lo(kr|ha)/layer.{0,4000}Expected all tensors to be on the same device",
        r"Expected all tensors to be on the same device.{0,400}get_delta_weight",
    ),
    frames=("tuners/lo(kr|ha)", "lo(kr|ha)", "diffusers/hooks/hooks.py:new_forward"),
    since="0.1.0",
)


def broken(group_offloading: ModuleType) -> bool:
    import torch

    find = resolve(group_offloading, "_find_parent_module_in_module_dict")
    return bool(find("a.one", {"": torch.nn.Module(), "a": torch.nn.ParameterDict()}) == "a")


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    def make(original):
        def _find_parent_module_in_module_dict(name, module_dict):
            parent = original(name, module_dict)
            while parent and is_container(module_dict[parent]):
                parent = original(parent.rpartition(".")[0], module_dict)
            return parent

        return _find_parent_module_in_module_dict

    draft.wrap_plain(group_offloading, "_find_parent_module_in_module_dict", make)
