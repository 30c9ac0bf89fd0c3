"""A LoHa on a GGUF model."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import LoHaConfig

    from ..models import gguf_model, lora

    pipe = lora.pipeline(transformer=gguf_model.flux(work))
    before = lora.run(pipe)
    names = [name for name, _ in pipe.transformer.named_modules() if name.endswith(("to_q", "to_v"))]
    pipe.transformer.add_adapter(LoHaConfig(r=4, target_modules=names, init_weights=False))
    off = (lora.run(pipe) - before).abs().max().item()
    assert 0 < off < float("inf"), "the LoHa has no effect"
    return f"the LoHa changes the output by {off:.2g}"
