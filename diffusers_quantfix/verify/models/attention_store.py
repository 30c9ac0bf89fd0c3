"""The attention maps that Attend-and-Excite keeps, after it has computed its loss from them."""

from __future__ import annotations

import sys


def check() -> str:
    """Whether the pipeline's store has maps without a graph, and the loss has one."""
    import diffusers
    import torch

    module = sys.modules[diffusers.StableDiffusionAttendAndExcitePipeline.__module__]
    store = module.AttentionStore((2, 2))
    store.num_att_layers = 1
    with torch.enable_grad():
        store(torch.ones(1, 4, 3, requires_grad=True) * 2, True, "up")
        total = store.aggregate_attention(("up", "down", "mid"))
    assert total.requires_grad and total.shape == (2, 2, 3)
    [kept] = store.get_average_attention()["up"]
    assert not kept.requires_grad, "the store keeps the graph of the pass on the device"
    return "the store keeps the maps without their graph"
