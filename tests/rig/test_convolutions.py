"""Depthwise convolutions, as CUDA dispatches them to operators of its own."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_depthwise_convolution(rig_devices, dimensions):
    import torch

    convolve = getattr(torch.nn.functional, f"conv{dimensions}d")
    values = torch.randn(1, 8, *(6,) * dimensions)
    weight = torch.randn(8, 1, *(3,) * dimensions)
    here, there = rig_devices.pair
    output = convolve(values.to(here), weight.to(here), padding=1, groups=8)
    assert output.device == here
    assert torch.equal(output.cpu(), convolve(values, weight, padding=1, groups=8))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        convolve(values.to(here), weight.to(there), padding=1, groups=8)
