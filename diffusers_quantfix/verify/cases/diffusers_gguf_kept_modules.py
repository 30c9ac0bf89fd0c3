"""A GGUF model runs with a layer in ``modules_to_not_convert``."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import four_bit, gguf_model

    reference = four_bit.run_flux(gguf_model.flux(work), "cpu")
    model = gguf_model.flux(work, plain=["x_embedder"])
    # The packed layers dequantize to float32 too.
    error = (four_bit.run_flux(model, "cpu") - reference).abs().max().item()
    assert error == 0, f"with a layer in float32 the output is off by {error}"
    return "exact with a layer in float32"
