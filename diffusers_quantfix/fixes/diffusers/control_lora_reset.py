"""A layer that a Control LoRA had widened is restored on another device.

Symptom: RuntimeError "Expected all tensors to be on the same device" after
    ``unload_lora_weights(reset_to_overwritten_params=True)``, when the model was moved or offloaded since the Control
    LoRA was loaded.
Cause: the layer is rebuilt from the weights that were saved when the LoRA was loaded. These weights stay on the device
    they had then: on the CPU for a pipeline that was moved to the GPU later. Under sequential offload the new layer has
    no hook. Under model offload, a model that is on the GPU at that moment counts as completely loaded, and the layer
    stays on the CPU.
Upstream: not reported.
Patch: the new layer is put on the device of the layer that it replaces, and is offloaded in the same way.
"""

from __future__ import annotations

from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.suspended import hooks_aside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

FIX = Fix(
    id="diffusers-control-lora-reset",
    title="a layer that a Control LoRA had widened is restored on another device",
    module="diffusers.loaders.lora_pipeline",
    claims={"diffusers": ">=0.32.2,<=0.42.1", "peft": ""},
    upstream=(
        "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/lora_pipeline.py",
    ),
    symptom="Expected all tensors to be on the same device after unload_lora_weights(reset_to_overwritten_params=True)",
    patterns=("Expected all tensors to be on the same device",),
    frames=("unload_lora_weights", "reset_to_overwritten_params", "x_embedder"),
)


def broken(lora_pipeline: ModuleType) -> bool:
    """Reset a model on meta whose weight was saved on the CPU: is the layer on meta again?"""
    import torch

    mixin = resolve(lora_pipeline, "FluxLoraLoaderMixin")
    resolve(mixin, "unload_lora_weights")

    class Transformer(torch.nn.Module):
        config = None
        _transformer_norm_layers = None

    model = Transformer()
    model.layer = torch.nn.Linear(2, 1, bias=False, device="meta")
    model._overwritten_params = {"layer.weight": torch.zeros(1, 1)}

    pipeline = type("Pipeline", (mixin,), {"_lora_loadable_modules": (), "transformer": model})
    pipeline().unload_lora_weights(reset_to_overwritten_params=True)
    return not model.layer.weight.is_meta


def patch(lora_pipeline: ModuleType, draft: Draft) -> None:
    def make(original):
        def unload_lora_weights(self, *args, **kwargs):
            name = self.transformer_name
            transformer = getattr(self, "transformer", None) or getattr(self, name, None)
            widened = getattr(transformer, "_overwritten_params", None)
            if not widened:
                return original(self, *args, **kwargs)
            with hooks_aside(transformer):
                before = {
                    layer: _below_adapter(transformer, layer)
                    for layer in (parameter.rpartition(".")[0] for parameter in widened)
                }
                result = original(self, *args, **kwargs)
                for layer, old in before.items():
                    new = _below_adapter(transformer, layer)
                    if new is not None and old is not None and new is not old:
                        new.to(old.weight.device)
            return result

        return unload_lora_weights

    draft.wrap_plain(resolve(lora_pipeline, "FluxLoraLoaderMixin"), "unload_lora_weights", make)


def _below_adapter(model: Any, name: str) -> Any:
    """The layer of that name, inside peft's layer if it has one; None if it no longer exists."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return None
    return getattr(layer, "base_layer", layer)
