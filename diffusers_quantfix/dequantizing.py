"""`dequantize_lora_layers`: the GGUF layers that a LoRA changes become plain ones, so that it can be fused.

`adapters.merging_gguf` says why the merged weights are not packed again.

Neither torch nor another library is imported here at module level.

Upstream: ``GGUFLinear`` and ``_dequantize_gguf_and_restore_linear`` of diffusers/quantizers/gguf/utils.py;
``BaseTunerLayer`` of peft/tuners/tuners_utils.py.
"""

from __future__ import annotations

import sys

from .models.dequantize import refuse_offloaded
from .placement.components import components_of, is_module
from .placement.released import ReleasedError, released_message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["dequantize_lora_layers"]


def dequantize_lora_layers(pipe_or_model: Any) -> int:
    """Dequantize the GGUF layers that have a LoRA, so that it can be fused; all other layers stay packed.

        pipe.load_lora_weights("lora.safetensors")
        qf.dequantize_lora_layers(pipe)
        pipe.fuse_lora()

    Without this, ``fuse_lora()``, ``merge_adapter()`` and ``merge_and_unload()`` refuse GGUF layers. Each of them
    becomes the ``torch.nn.Linear`` that ``dequantize()`` of the whole model would make: on the same device, with a
    weight of shape (out_features, in_features) in the model's compute dtype. The output of the pipeline stays the same
    bit for bit. Layers with another adapter of peft (DoRA, LoKr, LoHa, ...) or a disabled one count too.

    The new weights take the memory of unquantized ones: in bfloat16 3.6 times that of Q4_0. To have them packed again,
    load the file again. ``unfuse_lora()`` works as in an unquantized model: it subtracts the LoRA from the rounded sum.

    Weights of other quantization methods do not change: adapters can be fused into them as they are.

    Args:
        pipe_or_model: a diffusers pipeline, a ``torch.nn.Module`` or a dict of components, with the LoRAs loaded. Model
            offload (``enable_model_cpu_offload()``) may be on.

    Returns:
        The number of layers that were dequantized; 0 if no GGUF layer has an adapter.

    Raises:
        TypeError: ``pipe_or_model`` is none of these.
        ValueError: sequential or group offload holds the weights of such a layer; nothing has been changed.
        ReleasedError: ``pipe_or_model`` or a model in it was released.
        torch.OutOfMemoryError: no memory is left for the next weight. The output is still the same, and a second call
            goes on with the layers that are left.
    """
    parts = components_of(pipe_or_model, "dequantize_lora_layers")
    models = [value for value in parts.values() if is_module(value)]
    if message := next(filter(None, map(released_message, [pipe_or_model, *models])), ""):
        raise ReleasedError(message)
    sharing: dict[int, dict[int, Any]] = {}  # peft layers by their base layer; components may share both
    for model in models:
        layers = list(_adapter_layers(model))
        if layers:
            refuse_offloaded(model, "dequantize_lora_layers()")
        for layer in layers:
            sharing.setdefault(id(layer.base_layer), {})[id(layer)] = layer
    for same in sharing.values():
        plain = _plain(next(iter(same.values())).base_layer)
        for layer in same.values():
            layer.base_layer = plain
    return len(sharing)


def _adapter_layers(model: Any) -> Iterator[Any]:
    """The peft layers of ``model`` that directly wrap a layer with a GGUF weight."""
    utils = sys.modules.get("peft.tuners.tuners_utils")
    if utils is None:
        return
    for module in model.modules():
        if isinstance(module, utils.BaseTunerLayer):
            base = vars(module)["_modules"].get("base_layer")
            if type(getattr(base, "weight", None)).__name__ == "GGUFParameter":
                yield module


def _plain(packed: Any) -> Any:
    """A ``torch.nn.Linear`` that computes what the ``GGUFLinear`` does, with its accelerate hook."""
    import torch

    dequantize = sys.modules["diffusers.quantizers.gguf.utils"].dequantize_gguf_tensor
    dtype = packed.compute_dtype
    # On meta: torch would spend time on initial values.
    layer = torch.nn.Linear(packed.in_features, packed.out_features, packed.bias is not None, device="meta")
    layer.weight = torch.nn.Parameter(dequantize(packed.weight).to(dtype), requires_grad=False)
    if packed.bias is not None:
        # A GGUFLinear casts it in every forward pass.
        layer.bias = (
            packed.bias
            if packed.bias.dtype == dtype
            else torch.nn.Parameter(packed.bias.detach().to(dtype), packed.bias.requires_grad)
        )
    hook = getattr(packed, "_hf_hook", None)
    if hook is not None:  # it only moves the inputs to the device: `refuse_offloaded` refuses others
        hooks = sys.modules["accelerate.hooks"]
        hooks.remove_hook_from_module(packed)
        hooks.add_hook_to_module(layer, hook)
    return layer.train(packed.training)
