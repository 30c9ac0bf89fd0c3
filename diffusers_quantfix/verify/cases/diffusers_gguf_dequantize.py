"""A GGUF Flux transformer with float32 compute dtype is dequantized and runs."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:

    from ..models import four_bit, gguf_model

    where = cuda("dequantize() moves the model to it")
    model = gguf_model.flux(work).to(where)
    reference = four_bit.run_flux(model, where)
    model.dequantize()
    error = (four_bit.run_flux(model, where) - reference).abs().max().item()
    assert error == 0, f"the dequantized model is off by {error}"
    return "exact after dequantize()"
