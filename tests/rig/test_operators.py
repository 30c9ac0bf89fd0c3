"""Operators that CUDA has in a way of its own: depthwise convolutions, group norms, int4 weights."""

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


def test_a_group_norm_takes_any_strides(rig_devices):
    import torch

    values = torch.randn(2, 4, 3, 3, 5).permute(0, 4, 2, 3, 1)[:, :4]
    output = torch.nn.functional.group_norm(values.to(rig_devices.devices[0]), 2)
    torch.testing.assert_close(output.cpu(), torch.nn.functional.group_norm(values, 2))


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_int4_weights_are_packed_as_cuda_does_it(rig_devices, inner):
    """int32 [rows / 8][columns / (16 * inner)][32][inner / 2]; quanto before 0.2.7 asserts the dtype."""
    import torch

    if not hasattr(torch, "_convert_weight_to_int4pack_for_cpu"):
        pytest.skip("before torch 2.6 both devices have one name for it")
    rows, columns, group = 16, 256, 32
    generator = torch.Generator().manual_seed(7)
    values = torch.randint(16, (rows, columns), generator=generator, dtype=torch.uint8)
    scale = torch.rand(columns // group, rows, generator=generator).bfloat16()
    shift = torch.randn(columns // group, rows, generator=generator).bfloat16()
    inputs = torch.randn(4, columns, generator=generator).bfloat16()
    device = rig_devices.devices[0]
    two_by_two = (values[:, ::2] << 4 | values[:, 1::2]).to(device)
    packed = torch._convert_weight_to_int4pack(two_by_two, inner)
    assert (packed.device, packed.dtype) == (device, torch.int32)
    assert packed.shape == (rows // 8, columns // (16 * inner), 32, inner // 2)
    both = torch.stack((scale, shift), -1).to(device)
    output = torch._weight_int4pack_mm(inputs.to(device), packed, group, both)
    spread = lambda one: one.float().repeat_interleave(group, 0).T  # noqa: E731
    weight = (values.float() - 8) * spread(scale) + spread(shift)
    torch.testing.assert_close(output.cpu().float(), inputs.float() @ weight.T, rtol=0.02, atol=0.2)
