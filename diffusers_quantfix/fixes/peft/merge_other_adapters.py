"""Merging an adapter other than a LoRA into quantized weights has no effect.

Symptom: after ``merge_adapter()`` or ``merge_and_unload()`` of a model quantized by quanto the output is the same as
    without the adapter (VeRA, OFT, BOFT, MiSS, SHiRA, HiRA, RandLora, FourierFT, HRA and others; IA3 still scales the
    bias); in 8-bit with C3A, DEFT and HRA, before 0.20 with MiSS and Bone too; noise with RandLora. In 4-bit with
    RandLora, PVeRA, before 0.20 VeRA: RuntimeError "shape '[128, 128]' is invalid for input of size 131072", or noise.
Cause: their layers compute a plain weight and assign it to ``.data``, which a quanto layer, or an 8-bit layer that has
    run, does not read. The classes for 4-bit create the new weight marked as already quantized.
Upstream: not reported; https://github.com/huggingface/peft/pull/2000 (closed) would have added layers for quanto.
Patch: a clear error: before anything is merged if all of a model's adapters are affected, otherwise from the layer.
"""

from __future__ import annotations

import sys
from types import ModuleType

from ...adapters.merging_packed import holds, refuse_merge
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.live import merged_adapters as in_use  # noqa: F401

FIX = Fix(
    __doc__,
    id="peft-merge-other-adapters",
    module="peft.tuners.tuners_utils",
    claims={"peft": ">=0.13.2,<=0.21.2"},
    harm="wrong result",
    frames=(
        r"merge_adapter|merge_and_unload",
        r"\b(VeRA|OFT|BOFT|MiSS|Bone|SHiRA|HiRA|HRA|IA3|RandLora|FourierFT)\b",
    ),
    hot=True,
    asked_once=True,
)


def broken(tuners_utils: ModuleType) -> bool:
    """Does peft not handle quanto?"""
    known = vars(sys.modules["peft.import_utils"]) if "peft.import_utils" in sys.modules else ()
    resolve(tuners_utils, "check_adapters_to_merge")
    return not any("quanto" in name.lower() for name in known)


def patch(tuners_utils: ModuleType, draft: Draft) -> None:
    def each_layer(original):
        def check_adapters_to_merge(module, *args, **kwargs):
            names = original(module, *args, **kwargs)
            refuse_merge(module, names)
            return names

        return check_adapters_to_merge

    def all_layers(original):
        def _check_merge_allowed(self):
            # Merging only some adapters may skip the layers that cannot be merged; each layer checks that.
            names = list(self.peft_config)
            for layer in self.model.modules():
                ours = isinstance(layer, tuners_utils.BaseTunerLayer) and not layer.merged
                if ours and all(holds(layer, name) for name in names):
                    refuse_merge(layer, names)
            original(self)

        return _check_merge_allowed

    draft.wrap_plain(tuners_utils, "check_adapters_to_merge", each_layer)
    draft.wrap_plain(resolve(tuners_utils, "BaseTuner"), "_check_merge_allowed", all_layers)
