"""The autoencoder of Stable Audio 3 runs group-offloaded by leaves."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import audio, devices

    where = devices.cuda()
    expected = audio.run(audio.same().to(where), where)
    model = audio.same()
    model.enable_group_offload(onload_device=where, offload_type="leaf_level")
    assert torch.equal(audio.run(model, where), expected), "the outputs differ"
    return "the same output"
