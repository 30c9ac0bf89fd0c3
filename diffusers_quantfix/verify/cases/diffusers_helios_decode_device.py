"""Latents of Helios are decoded twice under a components manager that offloads."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers import ComponentsManager

    from ..models import devices, helios

    where = devices.cuda()
    whole = helios.pipeline()
    whole.to(where)
    expected = helios.video(whole, where)
    manager = ComponentsManager()
    pipe = helios.pipeline(manager)
    manager.enable_auto_cpu_offload(device=where, memory_reserve_margin="1000000GB")
    assert all(torch.equal(helios.video(pipe, where), expected) for _ in range(2)), "the videos differ"
    return "the same video in two runs"
