"""Unmerging an adapter from bitsandbytes weights does not restore the weights.

Symptom: after ``unfuse_lora()`` or ``unmerge_adapter()`` of a LoRA, HiRA, OFT, PVeRA, RoAd or VeRA the output of a
    4-bit or 8-bit model is not what it was before ``fuse_lora()`` or ``merge_adapter()``, and differs more each time.
    (Into 4-bit weights a PVeRA or VeRA cannot be merged: ``peft-merge-other-adapters``.)
Cause: ``merge`` and ``unmerge`` dequantize the weight, add or subtract the product of the adapter (HiRA multiplies and
    divides, OFT and RoAd rotate), and quantize the result again. Each time all values are rounded, and differently as
    each block's largest value changes.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/bnb.py; not reported; both warn that
    there are rounding errors. From peft 0.20 on VeRA, from 0.21 on OFT have other classes:
    ``peft-unmerge-other-adapters``. In 0.20 an OFT cannot be added to these layers.
Patch: the packed weight from before the first merge is kept on the CPU until the last adapter is unmerged, and then
    becomes the weight again, on its current device; the bias, which a RoAd also rotates, is restored too. If the weight
    was changed in between, if a merged adapter was deleted, or if the CPU has no memory to keep it (logged once),
    upstream's method remains. If either fails, the layer is restored.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging_bnb import patch_layers, round_again
from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...offloading.live import merged_adapters as in_use  # noqa: F401

FIX = Fix(
    __doc__,
    id="peft-unmerge-bitsandbytes",
    targets=(
        Target(
            "peft-unmerge-bnb",
            "peft.tuners.lora.bnb",
            {"peft": ">=0.8.0,<=0.21.2", "bitsandbytes": ""},
        ),
        Target(
            "peft-unmerge-hira", "peft.tuners.hira.bnb", {"peft": ">=0.20.0,<=0.21.2", "bitsandbytes": ""}
        ),
        Target(
            "peft-unmerge-oft",
            "peft.tuners.oft.bnb",
            {"peft": ">=0.16.0,<0.21.0", "bitsandbytes": ""},
            fixed_in="peft 0.21.0",  # there it has another class: see peft-unmerge-other-adapters
        ),
        Target(
            "peft-unmerge-pvera", "peft.tuners.pvera.bnb", {"peft": ">=0.19.0,<=0.21.2", "bitsandbytes": ""}
        ),
        Target(
            "peft-unmerge-road", "peft.tuners.road.bnb", {"peft": ">=0.18.0,<=0.21.2", "bitsandbytes": ""}
        ),
        Target(
            "peft-unmerge-vera",
            "peft.tuners.vera.bnb",
            {"peft": ">=0.14.0,<0.20.0", "bitsandbytes": ""},
            fixed_in="peft 0.20.0",  # there it has another class: see peft-unmerge-other-adapters
        ),
    ),
    harm="wrong result",
    frames=(
        "unfuse_lora|unmerge_adapter|unmerge",
        "bitsandbytes|nf4|int8|[48].?bit",
        r"\b(HiRA|PVeRA|RoAd)\b|tuners/\w+/bnb\.py",
    ),
    hot=True,
    asked_once=True,
)


def broken(bnb: ModuleType) -> bool:
    """Does ``unmerge`` of a class quantize?"""
    return round_again(bnb)


def patch(bnb: ModuleType, draft: Draft) -> None:
    patch_layers(bnb, draft)
