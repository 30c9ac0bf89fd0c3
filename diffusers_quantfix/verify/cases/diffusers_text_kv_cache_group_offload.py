"""TextKVCache is enabled on a model whose blocks are offloaded, and two prompts are drawn."""

from __future__ import annotations


def case(work: str) -> str | None:
    import diffusers
    import torch

    from ..models import group_offload, nucleus

    def run(model, device):
        if hasattr(model, "_diffusers_hook"):  # the offloaded one
            model.enable_cache(diffusers.TextKVCacheConfig())
        found = nucleus.outputs(model, device)
        if model.is_cache_enabled:
            model.disable_cache()
        return torch.stack(found)

    return group_offload.check(
        lambda device: nucleus.transformer().to(device),
        run,
        offload_type="block_level",
        num_blocks_per_group=1,
    )
