"""A Control LoRA is loaded into a Flux transformer from a GGUF file that is on the CPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import gguf_model, lora

    model = gguf_model.flux(work)
    layer = model.x_embedder
    with torch.no_grad():
        wanted = layer(torch.eye(64)) - layer.bias
    pipe = lora.pipeline(transformer=model)
    control = {
        "transformer.x_embedder.lora_A.weight": torch.ones(4, 128),
        "transformer.x_embedder.lora_B.weight": torch.ones(64, 4),
    }
    pipe.load_lora_weights(control, adapter_name="control")
    weight = model.x_embedder.base_layer.weight
    assert weight.shape == (64, 128), f"the layer has the shape {tuple(weight.shape)}"
    assert not weight[:, 64:].any(), "the new columns are not zero"
    off = (weight[:, :64].T - wanted).abs().max().item()
    assert off < 1e-5, f"the weights of the layer changed by {off:.2g}"
    return "the layer is widened, its weights are the same"
