"""Block-level group offloading leaves lists of blocks on the CPU.

Symptom: RuntimeError "Expected all tensors to be on the same device" or "Input type (CUDABFloat16Type) and weight type
    (CPUBFloat16Type) should be the same" from Stable Cascade, Wuerstchen, and the VAEs KVAE, VidTok, Kandinsky 6 SR and
    LTX-2 Audio, after ``enable_group_offload(offload_type="block_level")``.
Cause: each item of a ModuleList is onloaded when it is called. Here an item is itself a ModuleList, or a plain Module
    that only holds the blocks of one level: only the blocks in it are called. Or it is None (Wuerstchen).
Upstream: not reported.
Patch: diffusers sees the modules in such an item, one by one, instead of the item. An item with parameters of its own
    is onloaded with its model. A model with such items has groups of one block, whatever ``num_blocks_per_group`` says:
    a larger group is onloaded with its first block, and a decoder runs its levels from last to first.
"""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve, written_in
from ...finishing import holding
from ...offloading.trial import offloads_on_cpu

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-nested-lists",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    patterns=(
        "Expected all tensors to be on the same device",
        r"Input type \(\S+\) and weight type \(\S+\) should be the same",
    ),
    frames=("stable_cascade|kvae|vidtok|ltx2_audio|kandinsky6_sr", "group_offload", "block_level"),
    since="0.1.0",
)


def broken(group_offloading: ModuleType) -> bool:
    """Offload a list of lists, on the CPU: is a layer in the inner list never onloaded?"""
    import torch

    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.ModuleList([torch.nn.Linear(1, 1)])])
    if not offloads_on_cpu(group_offloading, model, "block_level"):
        return not written_in(resolve(group_offloading, "_apply_group_offloading_block_level"), __name__)
    return not hasattr(model.blocks[0][0], "_diffusers_hook")


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    import inspect
    from dataclasses import replace

    import torch

    def make(original):
        signature = inspect.signature(original)

        def _apply_group_offloading_block_level(module, *args, **kwargs):
            given = signature.bind(module, *args, **kwargs)
            named = getattr(given.arguments.get("config"), "block_modules", None) or ()
            children = called_children(module, named)
            if children is None:
                return original(module, *args, **kwargs)
            if "config" in given.arguments:
                given.arguments["config"] = replace(given.arguments["config"], num_blocks_per_group=1)
            else:  # before diffusers 0.35
                given.arguments["num_blocks_per_group"] = 1
            with holding(module, _modules=children):
                return original(*given.args, **given.kwargs)

        return _apply_group_offloading_block_level

    def called_children(module: Any, named: Collection[str]) -> dict[str, Any] | None:
        """The children of ``module`` with lists replaced by their blocks; None if nothing would change.

        Those in ``named`` stay: diffusers descends into each of them, and finds its lists.
        """
        children, changed = {}, False
        for name, child in module._modules.items():
            children[name] = child
            if name in named or not isinstance(child, torch.nn.ModuleList) or all(map(is_called, child)):
                continue
            changed = True
            blocks: dict[int, Any] = {}
            whole = {}
            for position, item in child._modules.items():
                called = called_in(item)
                if called is None:
                    whole[position] = item
                else:
                    blocks.update((id(block), block) for block in called)
            children[name] = torch.nn.ModuleList(blocks.values())
            if whole:
                # Not a list, so it is onloaded with the model; the name is one that no child can have.
                children[f"{name} "] = torch.nn.ModuleDict(whole)
        return children if changed else None

    def called_in(item: Any) -> list[Any] | None:
        """The blocks in ``item``, or itself; None if a module between them and ``item`` has a tensor."""
        if item is None:
            return []
        if is_called(item):
            return [item]
        if any(tensor is not None for held in (item._parameters, item._buffers) for tensor in held.values()):
            return None
        found = []
        for child in item._modules.values():
            inner = called_in(child)
            if inner is None:
                return None
            found += inner
        return found

    def is_called(item: Any) -> bool:
        if item is None:
            return False
        # accelerate gives every module of an 8-bit model a `forward`, even a list; `_old_forward` is the original.
        forward = vars(item).get("_old_forward") or item.forward
        return getattr(forward, "__func__", forward) is not torch.nn.Module.forward

    draft.wrap_plain(group_offloading, "_apply_group_offloading_block_level", make)
