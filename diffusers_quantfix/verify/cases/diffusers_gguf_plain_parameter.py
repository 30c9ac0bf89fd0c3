"""A layer of a GGUF model that is not quantized runs under sequential offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    from ..models import four_bit, gguf_model

    where = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = gguf_model.flux(work, plain=["proj_out"])
    reference = four_bit.run_flux(model.to(where), where)
    cpu_offload(model.proj_out.cpu(), where)
    error = (four_bit.run_flux(model, where) - reference).abs().max().item()
    assert error == 0, f"with an offloaded layer the output is off by {error}"
    return f"exact with an offloaded layer on {where}"
