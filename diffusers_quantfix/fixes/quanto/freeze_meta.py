"""Freezing a quanto model on meta computes each of its weights.

Symptom: ``from_pretrained`` of a saved model with quanto weights takes one to two milliseconds per layer, more than two
    thirds of it before reading anything.
Cause: diffusers prepares the model on meta and calls ``freeze``, so that its state dict has the names of the
    checkpoint. Each weight is quantized, and torch works out the shape of each step in Python.
Upstream: https://github.com/huggingface/optimum-quanto/blob/v0.2.7/optimum/quanto/quantize.py#L143; not reported.
Patch: of identical layers on meta, only the first is quantized, and the others get their own weights like its weight. A
    layer with data, or with a user-defined optimizer or class, is left to quanto.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="quanto-freeze-meta",
    module="optimum.quanto.quantize",
    claims={"optimum-quanto": ">=0.2.6,<=0.2.7"},
    harm="memory or time",
    asked_once=True,
)


def broken(quantize: ModuleType) -> bool:
    """Is each layer frozen separately, wherever its weight is?  Freezing one on meta would load half of torch."""
    import importlib

    # In 0.2.5 a torch operator without a meta implementation: freezing on meta raises RuntimeError.
    library = importlib.import_module("optimum.quanto.library.quantize")
    if hasattr(resolve(library, "quantize_symmetric"), "register_fake"):
        return False
    freeze = resolve(quantize, "freeze")
    mixin = resolve(quantize, "QModuleMixin")
    used = (
        names_used(freeze) | names_used(resolve(mixin, "freeze")) | names_used(resolve(mixin, "qweight").fget)
    )
    return not used & {"meta", "is_meta"}


def patch(quantize: ModuleType, draft: Draft) -> None:
    import torch

    mixin = resolve(quantize, "QModuleMixin")
    plain = torch.nn.Parameter
    # Those that quanto itself chooses: stateless, so equal weights have equal scales.
    optimizers = tuple(
        getattr(sys.modules[mixin.__module__], name) for name in ("AbsmaxOptimizer", "MaxOptimizer")
    )

    def make(original):
        def freeze(model):
            if any(kind(layer) for layer in model.modules()):
                freeze_each_kind(model)
                return None
            return original(model)

        return freeze

    def freeze_each_kind(model):
        first: dict[Any, Any] = {}  # kind of layer -> its weight, quantized
        for layer in model.modules():
            same = kind(layer)
            if same in first:
                layer.weight = like(first[same])
            elif isinstance(layer, mixin):
                layer.freeze()
                if same is not None and layer.frozen:
                    first[same] = layer.weight

    def kind(layer):
        """What the quantized weight of a layer on meta depends on; None if unknown, or if it has data."""
        if not isinstance(layer, mixin) or layer.weight_qtype is None:
            return None
        weight = layer._parameters.get("weight")
        layer_class = type(layer)
        if (
            type(weight) is not plain
            or not weight.is_meta
            or layer_class.freeze is not mixin.freeze
            or layer_class.qweight is not mixin.qweight
            or type(layer.optimizer) not in optimizers
        ):
            return None
        return (
            layer_class, type(layer.optimizer), layer.weight_qtype, layer.weight_group_size, layer.activation_qtype,
            weight.dtype, weight.shape, weight.stride(),
        )  # fmt: skip

    def like(weight):
        # A parameter detaches what it is made from, including the tensors inside, whose memory is shared so far.
        new = plain(weight)
        own(new)
        return new

    def own(weight):
        for name in weight.__tensor_flatten__()[0]:
            inner = getattr(weight, name)
            if hasattr(inner, "__tensor_flatten__"):
                own(inner)
            else:
                setattr(weight, name, torch.empty_like(inner))

    draft.wrap_plain(quantize, "freeze", make)
