"""Loading an adapter into a quantized model: what ``.to()`` means there.

peft moves the adapter of an 8-bit layer to where the layer is, when it is on meta still (``low_cpu_mem_usage=True``).

After it has put new layers into a model, diffusers calls ``model.to(device=model.device, dtype=model.dtype)``: the new
layers are to be where the model is, and of its dtype; nothing else changes. A quantized model refuses a dtype whatever
it is, so the adapter cannot be loaded. The fixes of the places that do so share this routine.

Neither torch nor another library is imported here at module level.

Upstream: diffusers/loaders/lora_base.py, diffusers/loaders/unet.py; diffusers/models/modeling_utils.py and
transformers/modeling_utils.py (``to``); ``_replace_module`` of the tuners of peft.
"""

from __future__ import annotations

import contextlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["empty_layers_stay", "moves_empty_layers", "moves_new_layers_only"]


def moves_empty_layers(replace_module: Callable[..., Any]) -> bool:
    """Whether ``_replace_module`` of a tuner of peft moves an adapter on meta to a layer that has a ``state``."""
    import torch

    base = torch.nn.Linear(1, 1, bias=False, device="meta")
    base.weight = torch.nn.Parameter(torch.empty(1, 1))
    base.state = object()
    adapter = torch.nn.Module()
    adapter.base_layer = base
    adapter.lora_A = torch.nn.Linear(1, 1, device="meta")
    tuner = type("Tuner", (), {"prefix": "lora_"})()
    try:
        replace_module(tuner, torch.nn.Module(), "layer", adapter, base)
    except NotImplementedError:  # "Cannot copy out of meta tensor"
        return True
    return False


def empty_layers_stay(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_replace_module`` of a tuner of peft that moves no adapter on meta; its data comes later, from a checkpoint."""

    def _replace_module(self: Any, parent: Any, child_name: str, new_module: Any, child: Any) -> Any:
        if not any(parameter.is_meta for parameter in new_module.parameters()):
            return original(self, parent, child_name, new_module, child)
        vars(new_module)["to"] = lambda *args, **kwargs: new_module
        try:
            return original(self, parent, child_name, new_module, child)
        finally:
            del vars(new_module)["to"]

    return _replace_module


@contextlib.contextmanager
def moves_new_layers_only(model: Any) -> Iterator[None]:
    """In the block ``model.to(device, dtype)`` of a quantized ``model`` takes the layers along that came in meanwhile.

    Only a dtype that the model has already is no cast; with another one upstream's ``to`` has to answer. Anything but a
    quantized model is left alone.
    """
    if not _is_quantized(model):
        yield
        return
    known = list(model.modules())
    own = vars(model).get("to")  # accelerate puts a warning around ``to`` of a model that it has dispatched
    original = model.to

    def to(*args: Any, **kwargs: Any) -> Any:
        device, dtype, _, _ = sys.modules["torch"]._C._nn._parse_to(*args, **kwargs)
        if dtype is None or dtype != model.dtype or (device is not None and not _is_on(model, device)):
            return original(*args, **kwargs)
        before = {id(module) for module in known}
        for module in list(model.modules()):
            # A layer that is quantized itself (the layer below an adapter, if it was exchanged) has a dtype of its own.
            if id(module) not in before and not _is_quantized_layer(module):
                _take_along(module, device, dtype)
        return model

    vars(model)["to"] = to
    try:
        yield
    finally:
        vars(model).pop("to", None)
        if own is not None:
            vars(model)["to"] = own


def _take_along(module: Any, device: Any, dtype: Any) -> None:
    """Move and cast the tensors of ``module`` itself, as ``torch.nn.Module.to`` does."""
    for tensor in [*module._parameters.values(), *module._buffers.values()]:
        if tensor is not None and not tensor.is_meta:
            tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else None)


def _is_on(model: Any, device: Any) -> bool:
    """Whether ``device`` is where ``model`` says that it is; a model may be spread over several."""
    here = model.device
    return here.type == device.type and device.index in (None, here.index)


def _is_quantized(model: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return False
    # diffusers says it of every backend; transformers' models have the method, those of diffusers not always.
    return (
        bool(getattr(model, "is_quantized", False)) or getattr(model, "quantization_method", None) is not None
    )


def _is_quantized_layer(module: Any) -> bool:
    return any(
        hasattr(parameter, "quant_state") or hasattr(parameter, "SCB")
        for parameter in module._parameters.values()
    )
