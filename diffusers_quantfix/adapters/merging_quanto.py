"""Merging a peft adapter into an optimum-quanto weight, and unmerging it.

peft's layers add their delta to ``base_layer.weight.data``. For a quanto tensor the sum is a new, dequantized tensor,
and assigning it to ``.data`` changes nothing that the layer uses; the adapter counts as merged.

Neither torch nor another library is imported here at module level.

Upstream: ``merge`` and ``unmerge`` of peft/tuners/lora/layer.py and peft/tuners/lycoris_utils.py.
"""

from __future__ import annotations

import sys
from functools import partial

from ..engine.probe import function_of
from .before_merge import KEPT, undone_on_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["adds_to_data", "on_plain_weight"]


def adds_to_data(cls: Any) -> bool:
    """Whether ``merge`` of a peft layer class adds to the data of the weight."""
    merge = vars(cls)["merge"]
    return {"weight", "data"} <= set(function_of(merge).__code__.co_names)


def on_plain_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``merge`` or ``unmerge`` of a peft layer: a quanto base layer has a plain weight during the call."""

    def merge_or_unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
        base = _quanto_layer(self)
        if base is None:
            return original(self, *args, **kwargs)
        merge = partial(original, self, *args, **kwargs)
        return undone_on_failure(self, base, partial(_on_plain_weight, self, base, merge))

    return merge_or_unmerge


def _quanto_layer(adapter: Any) -> Any:
    """The base layer of a peft layer if it is a frozen quanto layer, else None."""
    module = sys.modules.get("optimum.quanto.nn.qmodule")
    if module is None:
        return None
    base = adapter.get_base_layer()
    return base if isinstance(base, module.QModuleMixin) and base.frozen else None


def _on_plain_weight(adapter: Any, base: Any, change: Callable[[], Any]) -> Any:
    """Return ``change()``, for which ``base.weight`` is plain.

    Afterwards it is quantized again, if adapters were merged or unmerged.
    """
    import torch

    packed = base.weight
    merged = list(adapter.merged_adapters)
    base.weight = torch.nn.Parameter(_detached(packed).dequantize().clone(), requires_grad=False)
    result = change()
    if adapter.merged_adapters == merged:
        base.weight = packed
        return result
    kept = vars(adapter).get(KEPT)
    if adapter.merged_adapters or kept is None:
        base.freeze()
        base.weight.requires_grad_(packed.requires_grad)
    else:
        base.weight = _like(kept[0], packed)
    if not adapter.merged_adapters:
        vars(adapter).pop(KEPT, None)
    elif kept is None:
        # A quanto weight is copied with the model only if it is a parameter.
        vars(adapter)[KEPT] = (torch.nn.Parameter(_detached(packed).to("cpu"), requires_grad=False),)
    return result


def _like(kept: Any, now: Any) -> Any:
    """The kept weight as a parameter, with device, dtype and ``requires_grad`` of ``now``."""
    import torch

    weight = _detached(kept).to(now.device)
    if weight.dtype != now.dtype:
        weight = weight.to(now.dtype)
    return torch.nn.Parameter(weight, now.requires_grad)


def _detached(weight: Any) -> Any:
    """``weight`` without a graph; not within `no_grad`, which Ctrl-C as it ends would leave on in the thread."""
    import torch

    # In inference mode nothing has a graph, and a quanto weight cannot be detached.
    return weight if torch.is_inference_mode_enabled() else weight.detach()
