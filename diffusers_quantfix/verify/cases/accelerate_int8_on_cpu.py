"""Two 8-bit layers run under offload to the CPU, on a machine without a GPU."""

from __future__ import annotations

from ..case import CannotReproduce


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    from ..models import eight_bit

    if torch.cuda.is_available():
        raise CannotReproduce("this machine has a GPU")
    where = eight_bit.device()
    reference = eight_bit.run(eight_bit.layers(where), where)
    model = eight_bit.layers(where)
    cpu_offload(model, "cpu")
    error = (eight_bit.run(model, where) - reference).abs().max().item()
    assert error == 0, f"maximum error {error:.3g}"
    return "the output under CPU offload is exact"
