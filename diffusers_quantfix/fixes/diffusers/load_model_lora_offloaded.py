"""An adapter loaded into an offloaded model is lost.

Symptom: noise, NaN or RuntimeError "Tensor on device meta is not on the expected device" after
    ``transformer.load_lora_adapter()`` or ``add_adapter()`` under sequential offload; "KeyError: Parameter containing"
    under group offload with a stream.
Cause: peft moves the adapter to its layer's device: meta, which has no data. A pipeline's ``load_lora_weights`` removes
    the hooks first and restores them afterwards, and rebuilds the groups; a model's methods do not.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/peft.py; not reported.
Patch: the same for the model's own methods.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

from ...engine.draft import Draft
from ...engine.errors import Undecided
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.target import finished
from ...finishing import finished_after
from ...offloading.hooks import group_again, group_config
from ...offloading.suspended import hooks_aside

FIX = Fix(
    __doc__,
    id="diffusers-load-model-lora-offloaded",
    module="diffusers.loaders.peft",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "accelerate": "", "peft": ""},
    harm="wrong result",
    frames=("load_lora_adapter", "add_adapter", "loaders/peft.py"),
    since="0.1.0",
)


def broken(peft: ModuleType) -> bool:
    """Add an adapter to an offloaded layer; is it on meta, with no hook that could onload it?

    It is a LoHa, which is added in the same way: for a LoRA peft would import its bitsandbytes layers.

    Raises:
        Undecided: accelerate or peft is not fully imported; until then nothing can be offloaded or adapted. An import
            of peft can lead here through transformers and optimum-quanto.
    """
    for needed in ("accelerate.big_modeling", "peft"):
        if finished(needed) is None:
            raise Undecided(needed)
    import torch

    mixin = resolve(peft, "PeftAdapterMixin")
    resolve(mixin, "add_adapter")
    # What is added is not activated: that would read peft's version from its metadata once more.
    model = type("Model", (torch.nn.Module, mixin), {"set_adapter": lambda self, name: None})()
    model.layer = torch.nn.Linear(1, 1)
    sys.modules["accelerate.big_modeling"].cpu_offload(model, torch.device("cpu"))
    model.add_adapter(sys.modules["peft"].LoHaConfig(r=1, target_modules=["layer"]))
    weights = model.layer.hada_w1_a
    return bool(weights["default"].is_meta and not hasattr(weights, "_hf_hook"))


def patch(peft: ModuleType, draft: Draft) -> None:
    def make(original):
        def load_or_add(self, *args, **kwargs):
            if kwargs.get("_pipeline") is not None:  # which has removed the hooks
                return original(self, *args, **kwargs)
            config = group_config(self)

            def work():
                with hooks_aside(self):
                    return original(self, *args, **kwargs)

            # Before 0.35.0 a LoRA could not be loaded into groups, not even by a pipeline: upstream's own error.
            return finished_after(work, lambda: [partial(group_again, self, config)])

        return load_or_add

    mixin = resolve(peft, "PeftAdapterMixin")
    for method in ("load_lora_adapter", "add_adapter"):
        if hasattr(mixin, method):
            draft.wrap_plain(mixin, method, make)
