"""Group offloading of GGUF models is slow, and copies their weights back from the GPU.

Symptom: under ``enable_group_offload`` each move of a GGUF layer takes 2.6 times as long as that of a plain layer of
    the same size (1.9 times with ``use_stream=True``), and without a stream all weights are copied back to the CPU
    after each use, though they have not changed.
Cause: ``ModuleGroup`` reads and assigns the ``.data`` of a ``GGUFParameter``. Each such access and each ``.to()`` runs
    its ``__torch_function__``, which builds another ``GGUFParameter``.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L178; not
    reported.
Patch: groups that hold such weights are moved by ``group_offload``, as plain tensors; unchanged host copies are kept.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading import groups
from ...offloading.live import moved_groups as in_use  # noqa: F401

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-gguf",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "gguf": ""},
    harm="memory or time",
    frames=("group_offload", "GGUF"),
    since="0.1.0",
    hot=True,
)


def broken(group_offloading: ModuleType) -> bool:
    """Move a group on the CPU: does upstream go through the ``__torch_function__`` of a weight's class?"""
    import torch

    kind = resolve(group_offloading, "ModuleGroup")
    if not groups.is_left_to_diffusers(kind, "gguf"):
        return False

    class Weight(torch.nn.Parameter):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            Weight.calls += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    cpu = torch.device("cpu")
    layer = torch.nn.Module()
    layer.weight = Weight(torch.zeros(1), requires_grad=False)
    try:
        group = kind(modules=[layer], offload_device=cpu, onload_device=cpu, offload_leader=layer)
        Weight.calls = 0
        group.onload_()
    except AttributeError:  # some releases query the accelerator, and there is none
        return True
    return Weight.calls > 0


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    groups.take_over(draft, resolve(group_offloading, "ModuleGroup"), "gguf")
