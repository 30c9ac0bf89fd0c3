"""An 8-bit model is saved after a run; the checkpoint's weights are read as rows, as ``from_pretrained`` does."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Int8Params

    from ..models import eight_bit

    where = eight_bit.device()
    model = eight_bit.layers(where, 1)
    expected = eight_bit.run(model, where)
    # bitsandbytes 0.43.0 puts a string into it
    saved = {
        name: value.to(where) for name, value in model.state_dict().items() if not isinstance(value, str)
    }
    again = eight_bit.layers(where, 1)
    weight = Int8Params(saved["0.weight"], requires_grad=False)
    weight.CB, weight.SCB = weight.data, saved["0.SCB"]
    again[0].weight = weight
    output = eight_bit.run(again, where)
    assert torch.equal(output, expected), (
        f"the output is {output.flatten()[0]:g}, not {expected.flatten()[0]:g}"
    )
    return "the output equals that of the saved model"
