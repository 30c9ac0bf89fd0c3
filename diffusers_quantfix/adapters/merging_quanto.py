"""Merging an adapter of peft into a weight of optimum-quanto, and taking it out again.

peft's layers add their product to ``base_layer.weight.data``. For a tensor of quanto the sum is a new, dequantized
tensor, and assigning it to ``.data`` changes nothing that the layer uses; the adapter counts as merged.

Neither torch nor another library is imported here at module level.

Upstream: ``merge`` and ``unmerge`` of peft/tuners/lora/layer.py and peft/tuners/lycoris_utils.py.
"""

from __future__ import annotations

import contextlib
import sys

from ..engine.probe import function_of, written_in
from .before_merge import KEPT, undone_on_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["adds_to_data", "on_plain_weight"]


def adds_to_data(cls: Any) -> bool:
    """Whether ``merge`` of a layer class of peft adds to the data of the weight, with nothing of ours around it."""
    merge = vars(cls)["merge"]
    ours = written_in(function_of(merge), __name__) or written_in(merge, __name__)
    return not ours and {"weight", "data"} <= set(function_of(merge).__code__.co_names)


def on_plain_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    """``merge`` or ``unmerge`` of a layer of peft, which has a plain weight meanwhile if it is one of quanto."""

    def merge_or_unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
        base = _quanto_layer(self)
        if base is None:
            return original(self, *args, **kwargs)
        with _plain_weight(self, base):
            return original(self, *args, **kwargs)

    return merge_or_unmerge


def _quanto_layer(adapter: Any) -> Any:
    """The frozen layer of quanto below a layer of peft; None if it is another one."""
    module = sys.modules.get("optimum.quanto.nn.qmodule")
    if module is None:
        return None
    base = adapter.get_base_layer()
    return base if isinstance(base, module.QModuleMixin) and base.frozen else None


@contextlib.contextmanager
def _plain_weight(adapter: Any, base: Any) -> Iterator[None]:
    """In the block ``base.weight`` is a plain one; afterwards it is quantized, if adapters came in or went out."""
    import torch

    packed = base.weight
    merged = list(adapter.merged_adapters)
    with undone_on_failure(adapter, base):
        with torch.no_grad():
            base.weight = torch.nn.Parameter(packed.dequantize().clone(), requires_grad=False)
        yield
        if adapter.merged_adapters == merged:
            base.weight = packed
            return
        with torch.no_grad():
            kept = vars(adapter).get(KEPT)
            if adapter.merged_adapters or kept is None:
                base.freeze()
                base.weight.requires_grad_(packed.requires_grad)
            else:
                base.weight = _like(kept[0], packed)
            if not adapter.merged_adapters:
                vars(adapter).pop(KEPT, None)
            elif kept is None:
                # A weight of quanto is copied with the model only if it is a parameter.
                vars(adapter)[KEPT] = (torch.nn.Parameter(packed.detach().to("cpu"), requires_grad=False),)


def _like(kept: Any, now: Any) -> Any:
    """The kept weight, where the weight is now and in its dtype."""
    import torch

    weight = kept.to(now.device)
    if weight.dtype != now.dtype:
        weight = weight.to(now.dtype)
    return torch.nn.Parameter(weight, now.requires_grad)
