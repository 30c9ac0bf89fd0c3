"""A consistency decoder runs group-offloaded by leaves."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import consistency, devices

    where = devices.cuda()
    expected = consistency.run(consistency.decoder().to(where), where)
    model = consistency.decoder()
    model.enable_group_offload(onload_device=where, offload_type="leaf_level")
    assert torch.equal(consistency.run(model, where), expected), "the outputs differ"
    return "the same output"
