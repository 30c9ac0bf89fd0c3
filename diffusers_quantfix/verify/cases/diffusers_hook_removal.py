"""Group offload is removed from below a cache, as when a LoRA is loaded."""

from __future__ import annotations


def case(work: str) -> str | None:
    import diffusers
    import torch
    from diffusers.hooks import HookRegistry

    from ..case import CannotReproduce
    from ..models import flux, group_offload

    if not hasattr(diffusers, "FirstBlockCacheConfig"):
        raise CannotReproduce("no cache of this diffusers has a hook on the blocks that are offloaded")
    model = flux.transformer()
    group_offload.by_blocks(model)
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=10.0))
    HookRegistry.check_if_exists_or_initialize(model).remove_hook("group_offloading", recurse=True)
    computed = []
    model.single_transformer_blocks[0].norm.register_forward_hook(lambda *_: computed.append(1))
    with torch.no_grad(), model.cache_context("case"):
        for _ in range(3):
            model(**flux.inputs())
    assert len(computed) == 1, f"the cache skipped no block: it was computed {len(computed)} times"
    return "the block was computed in 1 of 3 passes"
