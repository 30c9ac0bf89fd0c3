"""A layer widened by a Control LoRA is restored on the wrong device, or unquantized.

Symptom: RuntimeError "Expected all tensors to be on the same device" after
    ``unload_lora_weights(reset_to_overwritten_params=True)``, if the model was moved or offloaded after the Control
    LoRA was loaded.
Cause: the layer is rebuilt from the weights that were saved when the LoRA was loaded. These weights stay on the device
    they were on: the CPU for a pipeline that was moved to the GPU later. Under sequential offload the new layer has no
    hook. Under model offload, a model that is on the GPU at that moment counts as completely onloaded, and the layer
    stays on the CPU. A quantized layer is dequantized to be widened, and rebuilt from that: it stays plain, so a
    checkpoint saved afterwards cannot be loaded.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/lora_pipeline.py; diffusers issue
    10202, open, is about widened layers that are not quantized; the rest is not reported.
Patch: the new layer is put on the device of the layer it replaces, and is offloaded in the same way. The quantized
    layer is kept while it is widened, and put back.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.compiled import uncompiled
from ...offloading.suspended import hooks_aside

_KEPT = "_quantfix_before_control_lora"  # the attribute of a transformer: {name: quantized layer}

FIX = Fix(
    __doc__,
    id="diffusers-control-lora-reset",
    module="diffusers.loaders.lora_pipeline",
    claims={"diffusers": ">=0.32.2,<=0.42.1", "peft": ""},
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
    mixin = resolve(lora_pipeline, "FluxLoraLoaderMixin")
    draft.wrap_plain(mixin, "_maybe_expand_transformer_param_shape_or_error_", _keeping)

    def make(original):
        def unload_lora_weights(self, *args, **kwargs):
            transformer: Any = getattr(self, "transformer", None)
            if transformer is None:
                transformer = getattr(self, self.transformer_name, None)
            transformer = uncompiled(transformer)
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
                        kept = vars(transformer).get(_KEPT, {}).pop(layer, None)
                        if kept is not None:
                            parent, _, name = layer.rpartition(".")
                            setattr(transformer.get_submodule(parent), name, kept)
                            for part in ("weight", "bias"):  # restored: must not be rebuilt again
                                widened.pop(f"{layer}.{part}", None)
                            new = kept
                        new.to(old.weight.device)
            return result

        return unload_lora_weights

    draft.wrap_plain(mixin, "unload_lora_weights", make)


def _keeping(original: Any) -> Any:
    """The function that widens layers of a transformer; the quantized ones it replaces are kept."""
    import torch

    def expand(cls: Any, transformer: Any, *args: Any, **kwargs: Any) -> Any:
        model = uncompiled(transformer)
        quantized = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and not _is_plain(layer)
        }
        result = original(cls, transformer, *args, **kwargs)
        if result and quantized:
            here = dict(model.named_modules())
            kept = vars(model).setdefault(_KEPT, {})
            for name, layer in quantized.items():
                if name in here and here[name] is not layer:
                    kept.setdefault(name.replace(".base_layer", ""), layer)
        return result

    return expand


def _is_plain(layer: Any) -> bool:
    import torch

    return type(layer) is torch.nn.Linear and type(layer.weight.data) is torch.Tensor


def _below_adapter(model: Any, name: str) -> Any:
    """The layer of that name, inside peft's layer if it has one; None if it no longer exists."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return None
    return getattr(layer, "base_layer", layer)
