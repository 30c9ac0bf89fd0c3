"""A Flux transformer that quanto quantized is saved and loaded."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch

    from ..models import four_bit, quanto_models

    model = quanto_models.flux(os.path.join(work, "flux"), "float8")
    cpu = torch.device("cpu")
    reference = four_bit.run_flux(model, cpu)
    model.save_pretrained(os.path.join(work, "quantized"))
    loaded = quanto_models.flux(os.path.join(work, "quantized"))
    assert loaded.device == cpu, f"the loaded model is on {loaded.device}"
    assert torch.equal(four_bit.run_flux(loaded, cpu), reference), "the output changed"
    return "saved and loaded on the CPU; output exact"
