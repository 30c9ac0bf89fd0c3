"""An 8-bit model is offloaded after a run and runs again; no weight may stay on the device."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    from ..models import eight_bit

    where = eight_bit.device()
    model = eight_bit.layers(where)
    size = sum(tensor.nbytes for layer in model for tensor in (layer.weight, layer.weight.SCB))

    def left() -> int:
        held = [getattr(layer.state, name, None) for layer in model for name in ("CB", "CxB", "SCB")]
        return sum(tensor.nbytes for tensor in held if tensor is not None and not tensor.is_meta)

    reference = eight_bit.run(model, where)
    cpu_offload(model, where)
    assert left() == 0, f"of an offloaded model {left()} of {size} bytes of weights are still on {where}"
    output = eight_bit.run(model, where)
    assert left() == 0, f"after a run {left()} of {size} bytes of weights are still on {where}"
    assert torch.equal(output, reference), "the output changed"
    return f"after a run 0 of {size} bytes of weights are on {where}; output exact"
