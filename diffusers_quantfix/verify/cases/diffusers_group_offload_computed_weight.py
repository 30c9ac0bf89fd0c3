"""A layer with weight normalization is group-offloaded by leaves."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers.hooks import apply_group_offloading

    from ..models import devices

    where = devices.cuda()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Conv1d(4, 4, 1))).eval()
    sound = torch.randn(1, 4, 8)
    with torch.no_grad():
        expected = model(sound)
        apply_group_offloading(model, where, torch.device("cpu"), offload_type="leaf_level")
        difference = model(sound.to(where)).cpu() - expected
    assert difference.abs().max() < 1e-5, "the output differs"
    return "computes the same"
