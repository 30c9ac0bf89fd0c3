"""TextKVCache is enabled on a model with group-offloaded blocks, and two prompts are run."""

from __future__ import annotations


def case(work: str) -> str | None:
    import diffusers
    import torch

    from ..case import NeedsDevice
    from ..models import nucleus

    if not torch.cuda.is_available():
        raise NeedsDevice("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    model = nucleus.transformer().to(device)
    expected = torch.stack(nucleus.outputs(model, device))
    model.cpu()
    model.enable_group_offload(device, offload_type="block_level", num_blocks_per_group=1)
    model.enable_cache(diffusers.TextKVCacheConfig())
    error = (torch.stack(nucleus.outputs(model, device)) - expected).abs().max().item()
    assert error == 0, f"maximum error {error:.3g}"
    return "the output is exact"
