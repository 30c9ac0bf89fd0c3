"""A Flux pipeline with an 8-bit transformer is moved to the CPU."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    from ..models import eight_bit

    where = cuda()
    before = eight_bit.allocated(where)
    pipe = FluxPipeline(
        FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, eight_bit.transformer(work, where)
    )
    size = eight_bit.allocated(where) - before
    pipe.to("cpu", silence_dtype_warnings=True)
    left = eight_bit.allocated(where) - before
    assert left <= 0, f"after pipe.to('cpu') {left} of {size} bytes are still on {where}"
    return f"after pipe.to('cpu') 0 of {size} bytes are left on {where}"
