"""A VQModel runs group-offloaded by leaves."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import devices, vq

    where = devices.cuda()
    expected = vq.run(vq.autoencoder().to(where), where)
    model = vq.autoencoder()
    model.enable_group_offload(onload_device=where, offload_type="leaf_level")
    assert torch.equal(vq.run(model, where), expected), "the outputs differ"
    return "the same output"
