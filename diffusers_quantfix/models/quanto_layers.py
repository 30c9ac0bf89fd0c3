"""Replacing the optimum-quanto layers of a model by plain ones, and repairing weights that report a wrong device.

Upstream: optimum/quanto/nn (``QModuleMixin``, ``QLinear``).
"""

from __future__ import annotations

from .dequantize import OFFLOADED, refuse_offloaded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def dequantized(model: Any, dtype: Any = None) -> Any:
    """Replace the ``QLinear`` layers of ``model`` by ``torch.nn.Linear`` layers, in place.

    Args:
        model: a ``torch.nn.Module``; its weights may be on any device but ``meta``.
        dtype: the dtype of the new weights and biases; by default that of the scales, as ``dequantize()`` returns it.

    Returns:
        ``model``, or the new layer if ``model`` itself is a quantized layer.

    Raises:
        ValueError: the model is offloaded sequentially or in groups, or weights are on ``meta`` for another reason.
    """
    import torch
    from optimum.quanto import QLinear

    refuse_offloaded(model)
    layers = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, QLinear) and layer.weight_qtype is not None
    }
    if any(layer.weight.is_meta for layer in layers.values()):
        raise ValueError(OFFLOADED)  # by a hook outside the model
    new: dict[int, Any] = {}  # a layer may have two names
    with torch.no_grad():
        for name, layer in layers.items():
            if id(layer) not in new:
                new[id(layer)] = _linear(layer, dtype)
            if not name:
                return new[id(layer)]
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, new[id(layer)])
    return model


def _linear(layer: Any, dtype: Any) -> Any:
    import torch

    weight = layer.weight.dequantize() if layer.frozen else layer.weight
    linear = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight.to(dtype or weight.dtype), layer.weight.requires_grad)
    if layer.bias is not None:
        linear.bias = torch.nn.Parameter(layer.bias.to(linear.weight.dtype), layer.bias.requires_grad)
    linear.train(layer.training)
    hook = getattr(layer, "_hf_hook", None)
    if hook is not None:  # it only aligns inputs, since nothing is on meta
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        remove_hook_from_module(layer)
        add_hook_to_module(linear, hook)
    return linear


def remade_where_loaded(model: Any) -> None:
    """Rebuild, in place, quanto weights that report ``meta`` although all their inner tensors have data."""
    import torch
    from optimum.quanto import QModuleMixin

    for layer in model.modules():
        held = layer._parameters.get("weight") if isinstance(layer, QModuleMixin) else None
        if held is None or not held.is_meta:
            continue
        devices = set(_devices(held))
        if len(devices) == 1 and "meta" not in {device.type for device in devices}:
            with torch.no_grad():
                # Chooses the class for this device, as `to` does, but without a copy of the bytes.
                weight = held.optimize()
                if weight is held:
                    weight = held.to(devices.pop())
            # Mark it as a parameter, as torch does; `Parameter` would take the weight apart and rebuild it.
            weight._is_param = True
            layer._parameters["weight"] = weight.requires_grad_(held.requires_grad)


def _devices(tensor: Any) -> Any:
    """Yield the devices of the innermost tensors of a quanto tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.device
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _devices(getattr(tensor, name))
