"""A GGUF Flux transformer with float32 compute dtype is dequantized and runs."""

from __future__ import annotations

from ..case import NeedsDevice


def case(work: str) -> str | None:
    import torch

    from ..models import four_bit, gguf_model

    if not torch.cuda.is_available():
        raise NeedsDevice("needs a CUDA device, to which dequantize() moves the model")
    where = torch.device("cuda", 0)
    model = gguf_model.flux(work).to(where)
    reference = four_bit.run_flux(model, where)
    model.dequantize()
    error = (four_bit.run_flux(model, where) - reference).abs().max().item()
    assert error == 0, f"the dequantized model is off by {error}"
    return "exact after dequantize()"
