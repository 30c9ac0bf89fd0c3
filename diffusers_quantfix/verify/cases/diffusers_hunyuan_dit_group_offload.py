"""HunyuanDiT runs group-offloaded by leaves."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import devices, hunyuan_dit

    where = devices.cuda()
    expected = hunyuan_dit.run(hunyuan_dit.transformer().to(where), where)
    model = hunyuan_dit.transformer()
    model.enable_group_offload(onload_device=where, offload_type="leaf_level")
    assert torch.equal(hunyuan_dit.run(model, where), expected), "the outputs differ"
    return "the same output"
