"""Loading an adapter into a quantized model: moving the new layers.

peft moves the adapter of an 8-bit layer to the layer's device even while the adapter is on meta
(``low_cpu_mem_usage=True``).

After adding new layers to a model, diffusers calls ``model.to(device=model.device, dtype=model.dtype)``: the new layers
get the model's device and dtype; nothing else changes. A quantized model refuses any dtype, so the adapter cannot be
loaded; a group-offloaded model ignores the call, and some models do not call it. The fixes share this module.

Neither torch nor another library is imported here at module level.

Upstream: diffusers/loaders/lora_base.py, diffusers/loaders/unet.py; diffusers/models/modeling_utils.py and
transformers/modeling_utils.py (``to``); ``_replace_module`` of the tuners of peft.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial

from ..finishing import finished

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

__all__ = ["bring_new_layers", "empty_layers_stay", "moves_empty_layers", "moves_new_layers_only"]


def moves_empty_layers(replace_module: Callable[..., Any]) -> bool:
    """Whether ``_replace_module`` of a peft tuner moves a meta adapter to the device of a layer with a ``state``."""
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
    """Wrap ``_replace_module`` of a peft tuner: it moves no meta adapter, whose data is loaded later."""

    def _replace_module(self: Any, parent: Any, child_name: str, new_module: Any, child: Any) -> Any:
        if not any(parameter.is_meta for parameter in new_module.parameters()):
            return original(self, parent, child_name, new_module, child)
        with finished(lambda: [partial(vars(new_module).pop, "to", None)]):
            vars(new_module)["to"] = lambda *args, **kwargs: new_module
            return original(self, parent, child_name, new_module, child)

    return _replace_module


@contextlib.contextmanager
def moves_new_layers_only(model: Any) -> Iterator[None]:
    """In the block, ``to(device, dtype)`` of a quantized ``model`` moves and casts the layers added since its start.

    It does so only for the model's own device and dtype; all other calls go to upstream's ``to``. Nothing happens to
    any other object than a quantized model.
    """
    if not _is_quantized(model):
        yield
        return
    known = list(model.modules())
    own = vars(model).get("to")  # accelerate wraps ``to`` of a dispatched model with a warning
    original = model.to

    def to(*args: Any, **kwargs: Any) -> Any:
        device, dtype, _, _ = sys.modules["torch"]._C._nn._parse_to(*args, **kwargs)
        if dtype is None or dtype != model.dtype or (device is not None and not _is_on(model, device)):
            return original(*args, **kwargs)
        bring_new_layers(model, known, device, dtype)
        return model

    def give_back() -> None:
        if own is None:
            vars(model).pop("to", None)
        else:
            vars(model)["to"] = own

    with finished(lambda: [give_back]):
        vars(model)["to"] = to
        yield


def bring_new_layers(model: Any, known: Iterable[Any], device: Any, dtype: Any) -> None:
    """Move and cast, as ``torch.nn.Module.to`` does, the modules of ``model`` that are not among the ``known`` ones.

    Args:
        model: a ``torch.nn.Module``.
        known: its modules from before.
        device: None for no move.
        dtype: for floating-point tensors.
    """
    before = {id(module) for module in known}
    for module in list(model.modules()):
        # A new layer may be quantized (the base layer of an adapter, if it was replaced) and keeps its dtype.
        if id(module) not in before and not _is_quantized_layer(module):
            _take_along(module, device, dtype)


def _take_along(module: Any, device: Any, dtype: Any) -> None:
    """Move and cast the module's own parameters and buffers, as ``torch.nn.Module.to`` does."""
    for tensor in [*module._parameters.values(), *module._buffers.values()]:
        if tensor is not None and not tensor.is_meta:
            tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else None)


def _is_on(model: Any, device: Any) -> bool:
    """Whether ``device`` is ``model.device``; a model may be spread over several devices."""
    here = model.device
    return here.type == device.type and device.index in (None, here.index)


def _is_quantized(model: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return False
    # diffusers sets ``is_quantized`` for every backend, but not always the method; transformers sets the method.
    return (
        bool(getattr(model, "is_quantized", False)) or getattr(model, "quantization_method", None) is not None
    )


def _is_quantized_layer(module: Any) -> bool:
    return any(
        hasattr(parameter, "quant_state") or hasattr(parameter, "SCB")
        for parameter in module._parameters.values()
    )
