"""Unmerging an adapter other than a LoRA from quantized weights does not restore the weights.

Symptom: after ``unmerge_adapter()`` of a VeRA, OFT, BOFT, MiSS or SHiRA the output of a model with bitsandbytes or
    torchao weights is not what it was before. It differs more each time.
Cause: ``merge`` and ``unmerge`` get the dequantized weight from the layer's ``quantization_backend``, add or subtract
    the adapter's product, and let it quantize the sum again. Each time all values are rounded.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/utils/quantization_utils.py; not reported.
Patch: as in ``peft-unmerge-bnb`` and ``peft-unmerge-torchao``: the packed weight from before the first merge is kept on
    the CPU until the last adapter is unmerged. A layer that is not quantized is left to upstream's methods.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...adapters import merging_bnb, merging_torchao
from ...adapters.before_merge import (
    forgets_deleted,
    keeps_bits,
    puts_bits_back,
    rounds_again,
    where_quantized,
)
from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import names_used
from ...offloading.live import merged_adapters as in_use  # noqa: F401

FIX = Fix(
    __doc__,
    id="peft-unmerge-other-adapters",
    module="peft.tuners",
    claims={"peft": ">=0.20.0,<=0.21.2"},
    harm="wrong result",
    frames=("unmerge_adapter|unmerge", r"\b(VeRA|OFT|BOFT|MiSS|SHiRA)\b"),
    hot=True,
    since="0.1.0",
    asked_once=True,
)


def broken(tuners: ModuleType) -> bool:
    """Does ``unmerge`` of a class quantize?"""
    return any(rounds_again(cls, "set_base_weight") for cls in _classes(tuners))


def patch(tuners: ModuleType, draft: Draft) -> None:
    for cls in _classes(tuners):
        draft.wrap_plain(cls, "merge", where_quantized(keeps_bits(_bits_of)))
        draft.wrap_plain(cls, "unmerge", where_quantized(puts_bits_back(_bits_of, _put)))
        draft.wrap_plain(cls, "delete_adapter", forgets_deleted)


def _classes(tuners: ModuleType) -> Iterator[type]:
    """The classes whose ``unmerge`` passes the weight to the layer's backend.

    Raises:
        TargetMissing: there is none.
    """
    found = False
    for name in sorted(sys.modules):  # not by attributes: an interrupted import leaves some out
        if not (name.startswith(f"{tuners.__name__}.") and name.endswith(".layer")):
            continue
        for cls in list(vars(sys.modules[name]).values()):
            methods = vars(cls) if isinstance(cls, type) and cls.__module__ == name else {}
            if {"merge", "unmerge"} <= set(methods) and "set_base_weight" in names_used(methods["unmerge"]):
                found = True
                yield cls
    if not found:
        raise TargetMissing(f"no layer of {tuners.__name__} has a set_base_weight")


def _bits_of(adapter: Any, base: Any) -> Any:
    found = merging_bnb.bits_of(adapter, base)
    if found is None and hasattr(base.weight, "__tensor_flatten__"):
        found = merging_torchao.bits_of(adapter, base)
    return found


def _put(base: Any, parts: Any) -> None:
    is_bnb = type(base.weight).__name__ in ("Params4bit", "Int8Params")
    (merging_bnb if is_bnb else merging_torchao).put(base, parts)
