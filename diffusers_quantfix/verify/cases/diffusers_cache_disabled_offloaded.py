"""A cache is disabled on an offloaded model: accelerate's forward, which onloads the weights, must survive."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate.hooks import ModelHook, add_hook_to_module
    from diffusers import FasterCacheConfig

    from ..models import flux

    class Seen(ModelHook):
        runs = 0

        def pre_forward(self, module, *args, **kwargs):
            self.runs += 1
            return args, kwargs

    model, hook = flux.transformer(), Seen()
    config = FasterCacheConfig(
        spatial_attention_timestep_skip_range=(-1, 1),
        current_timestep_callback=lambda: 500,
        attention_weight_callback=lambda _: 0.3,
        is_guidance_distilled=True,
    )
    model.enable_cache(config)
    add_hook_to_module(model, hook)
    model.disable_cache()
    with torch.no_grad():
        model(**flux.inputs())
    assert hook.runs == 1, "the model ran without accelerate's hook"
    return "the model runs with accelerate's hook"
