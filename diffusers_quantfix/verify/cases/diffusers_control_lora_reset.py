"""A Control LoRA is unloaded from a pipeline that was offloaded after the LoRA was loaded."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import lora

    expected = lora.run(lora.pipeline())
    pipe = lora.pipeline()
    control = lora.weights(pipe.transformer, "transformer")
    control["transformer.x_embedder.lora_A.weight"] = torch.ones(4, 128)
    control["transformer.x_embedder.lora_B.weight"] = torch.ones(64, 4)
    pipe.load_lora_weights(control, adapter_name="control")
    lora.offload(pipe.transformer)
    pipe.unload_lora_weights(reset_to_overwritten_params=True)
    places = {name: parameter.device.type for name, parameter in pipe.transformer.named_parameters()}
    left = [name for name, place in places.items() if place != "meta"]
    assert not left, f"{len(left)} weights are no longer offloaded: {', '.join(left)}"
    off = (lora.run(pipe) - expected).abs().max().item()
    assert off == 0, f"maximum error without the LoRA: {off:.3g}"
    return f"all {len(places)} weights are still offloaded; without the LoRA the output is exact"
