"""A program's own class, derived from the Flux transformer, gets a LoRA at half its strength."""

from __future__ import annotations

from ..models import lora


def case(work: str) -> str | None:
    from diffusers import FluxTransformer2DModel

    class OwnTransformer(FluxTransformer2DModel):
        pass

    pipe = lora.pipeline()
    config = pipe.transformer.config
    pipe.register_modules(transformer=OwnTransformer.from_config(config))
    lora.load(pipe)
    pipe.set_adapters(pipe.get_active_adapters(), 0.5)
    scales = {
        layer.scaling[name] for layer in pipe.transformer.modules() for name in getattr(layer, "scaling", {})
    }
    assert scales == {0.5}, f"the scales are {scales}"
    return "every layer of the LoRA has half its strength"
