"""A GGUF Flux transformer runs under disk offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch
    from accelerate import disk_offload

    from ..models import four_bit, gguf_model

    cpu = torch.device("cpu")
    reference = four_bit.run_flux(gguf_model.flux(work), cpu)
    model = gguf_model.flux(work)
    disk_offload(model, os.path.join(work, "offloaded"), execution_device=cpu)
    error = (four_bit.run_flux(model, cpu) - reference).abs().max().item()
    assert error == 0, f"off by {error} under disk offload"
    return "exact under disk offload"
