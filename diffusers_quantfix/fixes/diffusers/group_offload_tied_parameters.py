"""A parameter shared by two modules is left behind under leaf-level group offloading (T5's embedding).

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    (when checking argument for argument self in method wrapper_CUDA_index_select) from ``embed_tokens`` of T5 under
    ``enable_group_offload(offload_type="leaf_level")`` (transformers 5, diffusers before 0.36), or from any other
    module that is not a supported layer and shares its parameter with another module.
Cause: a parameter that belongs to no supported layer is onloaded when its module is called. The parameters come from
    ``named_parameters()``, which lists a shared one only once, under its first module. ``T5EncoderModel.shared`` is
    never called, ``encoder.embed_tokens`` is. From 0.36 on an embedding is a supported layer; other modules are not.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py; not reported.
Patch: a shared parameter is onloaded with each of its modules.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-tied-parameters",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    patterns=(
        r"models/(um)?t5/.{0,4000}Expected all tensors to be on the same device",
        r"Expected all tensors to be on the same device.{0,400}embed_tokens",
    ),
    frames=("t5|embed_tokens|tied", "diffusers/hooks/hooks.py:new_forward|group|leaf"),
    since="0.1.0",
)

_GATHER = "_gather_parameters_with_no_group_offloading_parent"


def broken(group_offloading: ModuleType) -> bool:
    """Is a shared parameter listed only under its first module?"""
    import torch

    gather = resolve(group_offloading, _GATHER)
    model = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    model[0].one = model[1].one = torch.nn.Parameter(torch.zeros(1))
    return {name for name, _ in gather(model, set())} == {"0.one"}


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    def make(original):
        def gather(module, modules_with_group_offloading):
            found = original(module, modules_with_group_offloading)
            named = {name for name, _ in module.named_parameters()}
            for place, owner in module.named_modules():
                for own, parameter in owner._parameters.items():
                    name = f"{place}.{own}" if place else own
                    named_elsewhere = parameter is not None and name not in named
                    if named_elsewhere and not comes(place, modules_with_group_offloading):
                        found.append((name, parameter))
            return found

        return gather

    def comes(place, modules):
        """Whether the module at ``place``, or one above it, onloads everything in it."""
        while place and place not in modules:
            place = place.rpartition(".")[0]
        return place in modules

    draft.wrap_plain(group_offloading, _GATHER, make)
