"""A GGUF Flux transformer runs three times under sequential offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    from ..models import four_bit, gguf_model

    where = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    reference = four_bit.run_flux(gguf_model.flux(work).to(where), where)
    model = gguf_model.flux(work)
    cpu_offload(model, where)
    errors = [(four_bit.run_flux(model, where) - reference).abs().max().item() for _ in range(3)]
    assert errors == [0, 0, 0], f"errors in three runs under sequential offload: {errors}"
    count = sum(1 for parameter in model.parameters() if hasattr(parameter, "quant_type"))
    return f"exact in three runs under sequential offload on {where} ({count} GGUF weights)"
