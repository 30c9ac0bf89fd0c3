"""A layer with weight normalization is offloaded sequentially."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    torch.manual_seed(0)
    layer = torch.nn.utils.weight_norm(torch.nn.Conv1d(4, 4, 1)).eval()
    sound = torch.randn(1, 4, 8)
    with torch.no_grad():
        expected = layer(sound)
        layer = cpu_offload(layer, torch.device("cpu"))
        difference = layer(sound) - expected
    assert not difference.is_meta, "the output has no data: it is on meta"
    assert difference.abs().max() < 1e-5, "the output differs"
    return "computes the same"
