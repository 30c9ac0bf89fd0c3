"""Adapters of many models cannot be selected or scaled.

Symptom: KeyError with the name of the model's class, such as "KeyError: 'SkyReelsV2Transformer3DModel'", from
    ``set_adapters`` of a pipeline or model: of Kandinsky 5, HunyuanVideo 1.5, SkyReels V2, Wan Animate, Bria FIBO and
    more, by release, and of every class that a program derives from one of diffusers.
Cause: ``set_adapters`` looks up by the class's name how to scale adapters, in a table that lists only some classes.
Upstream: https://github.com/huggingface/diffusers/pull/13320
Patch: the table answers for all other classes as it does for nearly all that it lists: the weights as they are.
"""

from __future__ import annotations

import collections
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-set-adapters-unknown-model",
    module="diffusers.loaders.peft",
    claims={"diffusers": ">=0.31.0,<0.38.0"},
    fixed_in="diffusers 0.38.0",
    patterns=(
        r"_SET_ADAPTER_SCALE_FN_MAPPING\[.{0,200}KeyError",
        r"KeyError: '\w*(Transformer\w*D?Model|ControlNetModel|UNet\w*)'",
    ),
    frames=("set_adapters", "loaders/peft.py:set_adapters"),
)

_TABLE = "_SET_ADAPTER_SCALE_FN_MAPPING"


class _WithDefault(collections.ChainMap):  # type: ignore[type-arg]  # not subscripted: pickled by name
    """Upstream's table, which a program may add to, and an answer for each class that it does not list."""

    def __missing__(self, name: str) -> Any:
        return _unchanged


def _unchanged(model: Any, weights: Any) -> Any:
    return weights


def broken(peft: ModuleType) -> bool:
    """Does the table have no answer for other classes?  (It is not asked: upstream's cure adds each one it is asked
    for.)"""
    return not hasattr(type(resolve(peft, _TABLE)), "__missing__")


def patch(peft: ModuleType, draft: Draft) -> None:
    draft.replace(peft, _TABLE, _WithDefault(resolve(peft, _TABLE)))
