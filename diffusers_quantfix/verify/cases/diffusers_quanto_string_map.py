"""A Flux transformer is quantized with quanto and device_map="auto"."""

from __future__ import annotations


def case(work: str) -> str | None:
    import diffusers
    import torch

    from ..models import quanto_models

    reference = quanto_models.flux(f"{work}/plain", "int8")
    model = diffusers.FluxTransformer2DModel.from_pretrained(
        f"{work}/plain",
        quantization_config=diffusers.QuantoConfig(weights_dtype="int8"),
        torch_dtype=torch.float32,
        device_map="auto",
    )
    where = next(model.parameters()).device
    ours, theirs = (one.get_submodule("proj_out").weight.dequantize().cpu() for one in (model, reference))
    # A GPU, on which the weights are quantized then, may round to the next of the 254 steps.
    step = 0 if where.type == "cpu" else theirs.abs().amax(1, keepdim=True) / 127
    assert ((ours - theirs).abs() <= 1.01 * step).all(), (
        "the weights differ from those loaded without a device_map"
    )
    return f"loaded onto {where}; the weights equal those loaded without a device_map"
