"""DDPM runs twice under model offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import ddpm, devices

    where = devices.cuda()
    expected = ddpm.image(ddpm.pipeline().to(where))
    pipe = ddpm.pipeline()
    pipe.enable_model_cpu_offload(device=where)
    assert all(torch.equal(ddpm.image(pipe), expected) for _ in range(2)), "the images differ"
    return "the same image in two runs"
