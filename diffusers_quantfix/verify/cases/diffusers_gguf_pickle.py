"""A GGUF Flux transformer is saved with torch.save and read again."""

from __future__ import annotations


def case(work: str) -> str | None:
    import io

    import torch

    from ..models import four_bit, gguf_model

    cpu = torch.device("cpu")
    model = gguf_model.flux(work)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    error = (four_bit.run_flux(twin, cpu) - four_bit.run_flux(model, cpu)).abs().max().item()
    assert error == 0, f"the model that was read is off by {error}"
    return "exact after torch.save and torch.load"
