"""TextKVCache is enabled on a model with group-offloaded blocks, and two prompts are run."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    import diffusers
    import torch

    from ..models import nucleus

    device = cuda()
    model = nucleus.transformer().to(device)
    expected = torch.stack(nucleus.outputs(model, device))
    model.cpu()
    model.enable_group_offload(device, offload_type="block_level", num_blocks_per_group=1)
    model.enable_cache(diffusers.TextKVCacheConfig())
    error = (torch.stack(nucleus.outputs(model, device)) - expected).abs().max().item()
    assert error == 0, f"maximum error {error:.3g}"
    return "the output is exact"
