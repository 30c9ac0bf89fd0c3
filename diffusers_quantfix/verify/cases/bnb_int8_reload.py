"""An 8-bit layer that has run loads the state dict of another one."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import eight_bit

    where = eight_bit.device()
    source, model = eight_bit.layers(where), eight_bit.layers(where, count=2)
    reference = eight_bit.run(source, where)
    with torch.no_grad():
        model[0].weight.zero_()
    eight_bit.run(model, where)
    model.load_state_dict(source.state_dict())
    assert torch.equal(eight_bit.run(model, where), reference), "the output is not that of the checkpoint"
    return "loaded a state dict after a forward pass; output exact"
