"""Merging a LoRA into weights of optimum-quanto has no effect, and switches the LoRA off.

Symptom: after ``fuse_lora()``, ``merge_adapter()`` or ``merge_and_unload()`` of a model with weights of quanto the
    output is that without a LoRA.
Cause: ``merge`` adds the product of the LoRA to ``base_layer.weight.data``. For a tensor of quanto the sum is a new,
    dequantized tensor, and assigning it to ``.data`` changes nothing that the layer uses; the adapter counts as merged.
Upstream: not reported; peft has layers of its own for other quantization methods, and none for quanto.
Patch: while peft merges, the layer has a plain weight; then it is quantized anew, as quanto quantizes it. The packed
    weight from before is kept in host memory until the adapter is taken out or unloaded, so that unmerging gives the
    very same bits back. When merging fails, the layer is what it was.
"""

from __future__ import annotations

import contextlib
import sys

from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import function_of, written_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

FIX = Fix(
    id="peft-merge-quanto",
    title="merging a LoRA into weights of quanto has no effect",
    module="peft.tuners.lora.layer",
    claims={"peft": ">=0.13.2,<=0.21.2", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    upstream=("https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/layer.py",),
    symptom="no LoRA effect after fuse_lora() or merge_and_unload() where quanto has quantized the model",
    harm="wrong result",
    frames=("merge_and_unload", "fuse_lora", "quanto"),
    hot=True,
)

_KEPT = "_quantfix_before_merge"  # a tuple: torch registers a bare Parameter as one of the layer


def broken(layer: ModuleType) -> bool:
    """Does a class add to the data of the weight, with nothing of ours around it?"""
    return any(
        not written_in(function_of(vars(cls)["merge"]), __file__)
        and not written_in(vars(cls)["merge"], __file__)
        and {"weight", "data"} <= set(function_of(vars(cls)["merge"]).__code__.co_names)
        for cls in _classes(layer)
    )


def patch(layer: ModuleType, draft: Draft) -> None:
    def make(original):
        def merge_or_unmerge(self, *args, **kwargs):
            base = quanto_layer(self)
            if base is None:
                return original(self, *args, **kwargs)
            with plain_weight(self, base):
                return original(self, *args, **kwargs)

        return merge_or_unmerge

    for cls in _classes(layer):
        draft.wrap_plain(cls, "merge", make)
        draft.wrap_plain(cls, "unmerge", make)


def _classes(layer: ModuleType) -> list[type]:
    """Those of linear layers and convolutions: quanto quantizes no others."""
    classes = [
        cls
        for name, cls in vars(layer).items()
        if name in ("Linear", "_ConvNd", "Conv2d") and {"merge", "unmerge"} <= set(vars(cls))
    ]
    if not classes:
        raise TargetMissing(f"{layer.__name__} has no Linear.merge")
    return classes


def quanto_layer(adapter: Any) -> Any:
    """The frozen layer of quanto below a layer of peft; None if it is another one."""
    module = sys.modules.get("optimum.quanto.nn.qmodule")
    if module is None:
        return None
    base = adapter.get_base_layer()
    return base if isinstance(base, module.QModuleMixin) and base.frozen else None


@contextlib.contextmanager
def plain_weight(adapter: Any, base: Any) -> Iterator[None]:
    """In the block ``base.weight`` is a plain one; afterwards it is quantized, if adapters came in or went out."""
    import torch

    packed, bias = base.weight, base.bias
    merged = list(adapter.merged_adapters)
    bias_before = None if bias is None else bias.data.clone()
    try:
        with torch.no_grad():
            base.weight = torch.nn.Parameter(packed.dequantize().clone(), requires_grad=False)
        yield
        if adapter.merged_adapters == merged:
            base.weight = packed
            return
        with torch.no_grad():
            kept = vars(adapter).get(_KEPT)
            if adapter.merged_adapters or kept is None:
                base.freeze()
                base.weight.requires_grad_(packed.requires_grad)
            else:
                base.weight = _like(kept[0], packed)
            if not adapter.merged_adapters:
                vars(adapter).pop(_KEPT, None)
            elif kept is None:
                vars(adapter)[_KEPT] = (packed.detach().to("cpu"),)
    except BaseException:
        base.weight = packed
        if bias is not None:
            bias.data = bias_before
        adapter.merged_adapters[:] = merged
        raise


def _like(kept: Any, now: Any) -> Any:
    """The kept weight, where the weight is now and in its dtype."""
    import torch

    weight = kept.to(now.device)
    if weight.dtype != now.dtype:
        weight = weight.to(now.dtype)
    return torch.nn.Parameter(weight, now.requires_grad)
