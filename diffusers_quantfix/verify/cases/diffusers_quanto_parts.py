"""A saved Flux transformer with quanto weights is loaded without one of its scales."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    from safetensors.torch import load_file, save_file

    from ..models import quanto_models

    folder = os.path.join(work, "quantized")
    quanto_models.flux(os.path.join(work, "flux"), "int4").save_pretrained(folder)
    file = os.path.join(folder, "diffusion_pytorch_model.safetensors")
    state = load_file(file)
    del state["x_embedder.weight._shift"]
    save_file(state, file, {"format": "pt"})
    try:
        quanto_models.flux(folder)
    except ValueError as error:
        assert "x_embedder.weight._shift" in str(error), f"the error does not name the tensor: {error}"
        return "the error names the tensor"
    raise AssertionError("the checkpoint was loaded")
