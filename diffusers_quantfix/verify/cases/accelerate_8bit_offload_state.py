"""An 8-bit model runs under sequential offload; what does it leave behind?"""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    from ..models import eight_bit

    where = eight_bit.device()
    reference = eight_bit.run(eight_bit.layers(where), where)
    model = eight_bit.layers(where)
    size = sum(tensor.nbytes for layer in model for tensor in (layer.weight, layer.weight.SCB))
    cpu_offload(model, where)
    output = eight_bit.run(model, where)
    held = [getattr(layer.state, name) for layer in model for name in ("CB", "SCB")]
    left = sum(tensor.nbytes for tensor in held if tensor is not None and not tensor.is_meta)
    assert left == 0, f"after a run {left} of {size} bytes of weights are still on {where}"
    assert torch.equal(output, reference), "the output changed"
    return f"after a run 0 of {size} bytes of weights are on {where}; output exact"
