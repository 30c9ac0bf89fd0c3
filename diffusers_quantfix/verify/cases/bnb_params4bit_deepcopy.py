"""A 4-bit layer is copied, and the original deleted."""

from __future__ import annotations


def case(work: str) -> str | None:
    import copy
    import gc
    import weakref

    import torch

    from ..models import four_bit

    layer = four_bit.linear(torch.nn.Linear(128, 128), four_bit.device())
    original = weakref.ref(layer)
    twin = copy.deepcopy(layer)
    del layer
    gc.collect()
    assert original() is None, "the original is not freed: the copy refers to it"
    assert twin.quant_state is twin.weight.quant_state, "the copy has two quant states"
    return "the original is freed"
