"""Group offloading of torchao models with a stream leaves them on the GPU.

Symptom: RuntimeError "cannot pin 'torch.cuda.CharTensor' only dense CPU tensors can be pinned" in the second forward
    pass of a group with ``use_stream=True, low_cpu_mem_usage=True``, when the model was on the CPU. Up to 0.37 every
    kind of group offloading raises "Expected all tensors to be on the same device", or keeps the model on the GPU.
Cause: ``ModuleGroup._to_cpu`` of 0.38.0 and later returns the parameter itself if it is already on the CPU, and
    ``swap_tensors`` moves what should be its host copy to the GPU. Releases before 0.38.0 replace only the wrapper.
    After each use on a stream the wrapper reports the GPU as its device while its inner tensors are not there.
Upstream: https://github.com/huggingface/diffusers/issues/14433 and
    https://github.com/huggingface/diffusers/issues/13281, PRs 13276 (0.38.0) and
    https://github.com/huggingface/diffusers/pull/14457 (open).
Patch: groups that hold such weights are moved by ``group_offload``, inner tensor by inner tensor, so the class of the
    weight does not have to support pinning. As upstream, they cannot be offloaded to disk.
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
    id="diffusers-group-offload-torchao",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "torchao": ""},
    patterns=(
        r"cannot pin '?torch\.cuda\.\w+Tensor'? only dense CPU tensors can be pinned",
        "invalid python storage",
        r"group.offloading .{0,20}use_stream.{0,40}torchao",
        r"no dispatch rule for .*is_pinned|aten\.is_pinned",
    ),
    frames=("group_offload", "torchao", "diffusers/hooks/"),
    hot=True,
)


def broken(group_offloading: ModuleType) -> bool:
    """Check what moves a group of such weights, and whether upstream's host copy is a different tensor."""
    group = resolve(group_offloading, "ModuleGroup")
    if not groups.is_left_to_diffusers(group, "torchao"):
        return False
    if not hasattr(group, "_to_cpu"):
        return "_is_torchao_tensor" not in vars(group_offloading)
    copies = {"clone", "detach", "copy", ("copy",), "empty_like"}
    return not copies & (names_used(group._to_cpu) | set(group._to_cpu.__code__.co_consts))


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    groups.take_over(draft, resolve(group_offloading, "ModuleGroup"), "torchao")
