"""A 4-bit layer with 96 inputs computes on the CPU: every block of its weight must have its own scale."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes import functional

    from ..models import four_bit

    four_bit.device()
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 64, bias=False)
    torch.nn.init.normal_(linear.weight)  # else all scales are about the same
    layer = four_bit.linear(linear, torch.device("cpu"))
    layer.train()  # so that no kernel for inference is used
    state = layer.weight.quant_state
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    packed = layer.weight.data.flatten()
    values = state.code[torch.stack([packed >> 4, packed & 15], dim=1).flatten().int()].view(
        -1, state.blocksize
    )
    weight = (values * scales[:, None]).view(64, 96)
    inputs = torch.randn(4, 96)
    expected = inputs @ weight.t()
    error = ((layer(inputs) - expected).norm() / expected.norm()).item()
    assert error < 0.02, f"the output is wrong by {error:.0%}"
    return "the output is that of the weight with its own scales"
