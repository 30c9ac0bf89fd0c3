"""A model of 8-bit layers is moved to the CPU and back, or to ``meta`` if there is no GPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import eight_bit

    where = eight_bit.device()
    if where.type == "cpu":
        model = eight_bit.layers(where).to("meta")
        kinds = {type(layer.weight).__name__ for layer in model}
        assert kinds == {"Int8Params"}, f"the weights became {kinds}"
        assert all(layer.weight.SCB.is_meta for layer in model), "the scales were not moved"
        return "moved 8-bit layers and their scales to meta"
    before = eight_bit.allocated(where)
    model = eight_bit.layers(where)
    reference = eight_bit.run(model, where)
    size = eight_bit.allocated(where) - before
    model.to("cpu")
    left = eight_bit.allocated(where) - before
    assert left <= 0, f"after .to('cpu') {left} of {size} bytes are still on {where}"
    model.to(where)
    back = eight_bit.allocated(where) - before
    assert back <= size, f"back on {where} the model takes {back} bytes instead of {size}"
    assert torch.equal(eight_bit.run(model, where), reference), "the output changed"
    return f"after .to('cpu') 0 of {size} bytes are left on {where}, back on it {back}; output exact"
