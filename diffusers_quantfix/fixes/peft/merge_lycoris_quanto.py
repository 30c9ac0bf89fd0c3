"""Merging a LoKr or LoHa into weights of optimum-quanto has no effect, and switches it off.

Symptom: after ``fuse_lora()``, ``merge_adapter()`` or ``merge_and_unload()`` of a model with weights of quanto the
    output is that without the adapter.
Cause: as of ``peft-merge-quanto``, in the layers that LoKr, LoHa and others share.
Upstream: not reported.
Patch: that of ``peft-merge-quanto``.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging_quanto import adds_to_data, on_plain_weight
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    id="peft-merge-lycoris-quanto",
    title="merging a LoKr or LoHa into weights of quanto has no effect",
    module="peft.tuners.lycoris_utils",
    claims={"peft": ">=0.13.2,<=0.21.2", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    upstream=("https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lycoris_utils.py",),
    symptom="no effect of a LoKr or LoHa after fuse_lora() or merge_and_unload() where quanto has quantized the model",
    harm="wrong result",
    frames=("lokr|loha|lycoris", "quanto"),
    since="0.1.0",
)


def broken(lycoris_utils: ModuleType) -> bool:
    """Does it add to the data of the weight, with nothing of ours around it?"""
    return adds_to_data(resolve(lycoris_utils, "LycorisLayer"))


def patch(lycoris_utils: ModuleType, draft: Draft) -> None:
    for verb in ("merge", "unmerge"):
        draft.wrap_plain(resolve(lycoris_utils, "LycorisLayer"), verb, on_plain_weight)
