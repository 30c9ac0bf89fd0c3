"""Group offloading of 4-bit and 8-bit models fails, or leaves them on the GPU.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    from a 4-bit or 8-bit model under ``enable_group_offload`` ("All input tensors need to be on the same GPU" with
    bitsandbytes < 0.46; an illegal memory access on some GPUs). With ``use_stream=True`` at leaf level it runs, but
    keeps the scales of every 4-bit layer, or every 8-bit weight whole, on the GPU.
Cause: ``ModuleGroup`` moves the parameters by their ``.data``. Quant states, CB and SCB are not parameters. Without a
    stream it offloads with ``module.to()``, which moves them to the CPU, and nothing moves them back.
Upstream: no issue; https://github.com/huggingface/diffusers/pull/11576 recommends the combination.
Patch: groups that hold such weights are moved by ``group_offload``, with their companions. What autograd saves of them
    stays on the device until the backward pass: with gradient checkpointing, whole blocks can be trained.
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
    id="diffusers-group-offload-bnb",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "bitsandbytes": ">=0.43.0"},
    patterns=(
        "Expected all tensors to be on the same device",
        "input tensors need to be on the same GPU, but found some tensors to not be on a GPU",
        "different from other tensors on cuda",
        "an illegal memory access was encountered",
    ),
    frames=(
        "diffusers/hooks/hooks.py:new_forward",
        "diffusers/hooks/",
        "group_offload",
        "bitsandbytes|4.?bit|8.?bit|absmax",
    ),
    hot=True,
)

# A release that handles companions has to name one of them.
_WORDS = ("quant_state", "bitsandbytes", "Params4bit", "MatmulLtState")


def broken(group_offloading: ModuleType) -> bool:
    """Check what moves a group of such weights, and whether upstream's code handles their companions."""
    group = resolve(group_offloading, "ModuleGroup")
    for name in ("_init_cpu_param_dict", "onload_", "offload_"):
        said = " ".join(names_used(resolve(group, name)))
        if any(word in said for word in _WORDS):
            return False
    return groups.is_left_to_diffusers(group, "bitsandbytes")


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    groups.take_over(draft, resolve(group_offloading, "ModuleGroup"), "bitsandbytes")
