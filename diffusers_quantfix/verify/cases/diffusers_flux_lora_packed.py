"""A LoRA with fewer input channels than the model is loaded into a Flux transformer from a GGUF file."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import gguf_model, lora

    model = gguf_model.flux(work)
    pipe = lora.pipeline(transformer=model)
    before = lora.run(pipe)
    weights = lora.weights(model, "transformer")
    down = torch.ones(4, 32)
    weights["transformer.x_embedder.lora_A.weight"] = down
    weights["transformer.x_embedder.lora_B.weight"] = torch.ones(64, 4)
    pipe.load_lora_weights(weights, adapter_name="one")
    loaded = model.x_embedder.lora_A["one"].weight
    assert loaded.shape == (4, 64), f"lora_A has the shape {tuple(loaded.shape)}"
    assert torch.equal(loaded[:, :32], down), "lora_A changed"
    assert not loaded[:, 32:].any(), "lora_A is not padded with zeros"
    off = (lora.run(pipe) - before).abs().max().item()
    assert 0 < off < float("inf"), "the LoRA has no effect"
    return f"the LoRA is loaded, and changes the output by {off:.2g}"
