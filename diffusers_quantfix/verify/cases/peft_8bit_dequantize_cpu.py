"""An 8-bit weight on the CPU is dequantized, with a GPU in the machine."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch
    from bitsandbytes import MatmulLtState
    from bitsandbytes.nn import Int8Params
    from peft.utils.integrations import dequantize_bnb_weight

    cuda()
    # As in a layer of a checkpoint loaded onto the CPU.
    weight = Int8Params(torch.full((4, 4), 127, dtype=torch.int8), requires_grad=False)
    weight.CB, weight.SCB = weight.data, torch.full((4,), 0.5)
    state = MatmulLtState()
    state.SCB = weight.SCB
    found = dequantize_bnb_weight(weight, state=state)
    assert found.device.type == "cpu" and state.SCB.device.type == "cpu", "the scales are left on the GPU"
    assert torch.allclose(found.float(), torch.tensor(0.5)), f"a weight of 0.5 became {found.max().item():g}"
    return "the weight is dequantized, and the scales stay on the CPU"
