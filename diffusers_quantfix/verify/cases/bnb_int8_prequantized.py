"""A weight from an 8-bit checkpoint is moved to its device: the layer must treat it as quantized."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Int8Params

    from ..models import eight_bit

    where = eight_bit.device()
    model = eight_bit.layers(where, 1)
    quantized = model[0].weight
    data, scales = quantized.data.cpu(), quantized.SCB
    expected = eight_bit.run(model, where)
    model[0].weight = Int8Params(data, requires_grad=False).to(where)
    model[0].weight.SCB = scales
    model[0].state.CB = model[0].state.SCB = None
    output = eight_bit.run(model, where)
    assert torch.equal(output, expected), (
        f"the output is {output.flatten()[0]:g}, not {expected.flatten()[0]:g}"
    )
    return "the output equals that of the saved model"
