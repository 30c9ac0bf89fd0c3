"""A LoRA is loaded into a Flux transformer that quanto has quantized."""

from __future__ import annotations

from ..models import flux


def case(work: str) -> str | None:
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
    from optimum.quanto import freeze, qint8, quantize

    transformer = flux.transformer()
    quantize(transformer, weights=qint8)
    freeze(transformer)
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipeline = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **parts)
    name = "transformer.transformer_blocks.0.attn.to_q"
    lora = {f"{name}.lora_A.weight": torch.ones(4, 64), f"{name}.lora_B.weight": torch.ones(64, 4)}
    pipeline.load_lora_weights(lora, adapter_name="one")
    found = sum("lora" in key for key, _ in transformer.named_parameters())
    assert found == 2, f"loaded {found} LoRA tensors instead of 2"
    return "loaded both tensors of the LoRA"
