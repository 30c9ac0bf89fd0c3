"""A DoRA is added to a GGUF model."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import LoraConfig

    from ..models import gguf_model, lora

    pipe = lora.pipeline(transformer=gguf_model.flux(work))
    before = lora.run(pipe)
    names = [name for name, _ in pipe.transformer.named_modules() if name.endswith(("to_q", "to_v"))]
    pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=names, use_dora=True))
    off = (lora.run(pipe) - before).abs().max().item()
    assert off < 1e-5, f"an untrained DoRA changes the output by {off:.2g}"
    return f"added an untrained DoRA to {len(names)} GGUF layers; output unchanged"
