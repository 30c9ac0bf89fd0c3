"""``set_lora_device`` of a sequentially offloaded pipeline fails.

Symptom: NotImplementedError "Cannot copy out of meta tensor; no data!" from ``pipe.set_lora_device(...)`` after
    ``enable_sequential_cpu_offload()``; whether components that are not offloaded are moved depends on their order.
Cause: the adapter's weights are moved like those of any layer. Between uses these are meta tensors.
Upstream: https://github.com/huggingface/diffusers/issues/9913.
Patch: an adapter's offloaded layer stays as it is, whatever the device: its weights are in host memory, as
    ``set_lora_device(..., "cpu")`` requests, and its hook onloads them where they are used. All other layers are moved.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

from ...adapters.merging import offloaded_adapter_layer
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...finishing import finished
from ...offloading.hooks import align_hooks

FIX = Fix(
    __doc__,
    id="diffusers-lora-device-offloaded",
    module="diffusers.loaders.lora_base",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "accelerate": "", "peft": ""},
    patterns=("Cannot copy out of meta tensor; no data",),
    frames=("set_lora_device", "lora_base.py:set_lora_device"),
)


def broken(lora_base: ModuleType) -> bool:
    """Set the device of an adapter whose layer is offloaded."""
    mixin: Any = resolve(lora_base, "LoraBaseMixin")
    resolve(mixin, "set_lora_device")
    model = offloaded_adapter_layer(lora_base.ModelMixin)
    model.layer.lora_A = model.layer.lora_B = {"one": model.layer.base_layer}

    class Pipeline(mixin):
        _lora_loadable_modules = ("transformer",)
        transformer = model

    try:
        Pipeline().set_lora_device(["one"], "cpu")
    except NotImplementedError:
        return True
    return False


def patch(lora_base: ModuleType, draft: Draft) -> None:
    def make(original):
        def set_lora_device(self, *args, **kwargs):
            models = (getattr(self, name, None) for name in self._lora_loadable_modules)
            with stay_offloaded(*models):
                return original(self, *args, **kwargs)

        return set_lora_device

    draft.wrap_plain(resolve(lora_base, "LoraBaseMixin"), "set_lora_device", make)


@contextlib.contextmanager
def stay_offloaded(*models: Any) -> Iterator[None]:
    """A block in which ``to`` of the offloaded adapter layers in ``models`` does nothing."""
    layers = [
        part
        for model in models
        if model is not None
        for layer in model.modules()
        if isinstance(layer, sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer)
        for part in layer.modules()
        if "to" not in vars(part) and any(hook.offload for hook in align_hooks(part))
    ]
    with finished(lambda: [partial(vars(layer).pop, "to", None) for layer in layers]):
        for layer in layers:
            vars(layer)["to"] = lambda *args, layer=layer, **kwargs: layer
        yield
