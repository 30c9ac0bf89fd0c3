"""Group offloading of quanto models fails, or leaves them on the GPU.

Symptom: ``enable_group_offload`` of a model quantized by optimum-quanto raises RuntimeError "Expected all tensors to be
    on the same device, but found at least two devices, cuda:0 and cpu!" ("mat2 is on cpu, different from other tensors
    on cuda:0"). With ``use_stream=True`` and a model that was on the GPU it runs, but all of it stays there. To disk:
    "Attempted to access the data pointer on an invalid python storage".
Cause: ``ModuleGroup`` assigns the ``.data`` of a parameter. For a tensor subclass that wraps ``_data``, ``_scale`` and
    ``_shift`` this replaces only the wrapper; its pinned copy is the dequantized weight.
Upstream: https://github.com/huggingface/diffusers/issues/12610, https://github.com/huggingface/diffusers/pull/14038
    (open).
Patch: groups that hold such weights are moved by ``group_offload``, inner tensor by inner tensor, unchanged: a weight
    packed for a kernel is not packed again at each use. A weight packed for a CPU kernel (int4 in bfloat16) is unpacked
    once. Offloading them to disk is not supported and raises an error.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...offloading import groups
from ...offloading.live import moved_groups as in_use  # noqa: F401

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-quanto",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(
        "Expected all tensors to be on the same device",
        "mat2 is on cpu, different from other tensors on cuda",
    ),
    frames=(
        "diffusers/hooks/hooks.py:new_forward",
        "diffusers/hooks/",
        "group_offload",
        "quanto",
        "argument mat2",
    ),
    hot=True,
)


def broken(group_offloading: ModuleType) -> bool:
    """Check what moves a group of such weights, and whether upstream's code handles them."""
    group = resolve(group_offloading, "ModuleGroup")
    said = set(vars(group_offloading))
    for name in ("_init_cpu_param_dict", "onload_", "offload_"):
        said |= names_used(resolve(group, name))
    if any("quanto" in word for word in said):
        return False
    return groups.is_left_to_diffusers(group, "optimum")


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    groups.take_over(draft, resolve(group_offloading, "ModuleGroup"), "optimum")
