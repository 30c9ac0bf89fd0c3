"""The state dict of an 8-bit model is assigned to another one."""

from __future__ import annotations


def case(work: str) -> str | None:
    import copy

    import torch

    from ..models import eight_bit

    where = eight_bit.device()
    source, model = eight_bit.layers(where), eight_bit.layers(where)
    saved = copy.deepcopy(source.state_dict())  # bitsandbytes 0.43.0 puts a string into it
    reference = eight_bit.run(source, where)
    with torch.no_grad():
        model[0].weight.zero_()
    model.load_state_dict(saved, assign=True)
    assert torch.equal(eight_bit.run(model, where), reference), "the output is not that of the checkpoint"
    return "assigned the state dict; output exact"
