"""DiT runs group-offloaded by leaves."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import devices, dit

    where = devices.cuda()
    expected = dit.run(dit.transformer().to(where), where)
    model = dit.transformer()
    model.enable_group_offload(onload_device=where, offload_type="leaf_level")
    assert torch.equal(dit.run(model, where), expected), "the outputs differ"
    return "the same output"
