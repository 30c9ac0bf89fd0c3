"""``torch.load`` with a dict of devices leaves torchao weights on two devices.

Symptom: after ``torch.load(file, map_location={"cuda:0": "cuda:1"})`` RuntimeError "Expected all tensors to be on the
    same device"; ``.to("cuda:0")`` moves nothing.
Cause: as for quanto (``quanto-load-map``): torch does not find a wrapper's device in the dict.
Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_utils.py#L131; not reported.
Patch: an unpickled torchao tensor reports the device of its inner tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.wrappers import following, is_torn_by_a_map

FIX = Fix(
    __doc__,
    id="torchao-load-map",
    module="torchao.quantization.quant_api",
    claims={"torchao": ">=0.7.0,<=0.18.0"},
    patterns=(
        r"map_location.{0,2000}torchao.{0,4000}Expected all tensors to be on the same device",
        r"Expected all tensors to be on the same device.{0,400}map_location.{0,400}torchao",
    ),
    frames=("map_location", "torchao"),
    hot=True,
    since="0.1.0",
    asked_once=True,
)


def broken(quant_api: ModuleType) -> bool:
    resolve(sys.modules["torchao.utils"], "TorchAOBaseTensor")
    return is_torn_by_a_map()


def patch(quant_api: ModuleType, draft: Draft) -> None:
    base = resolve(sys.modules["torchao.utils"], "TorchAOBaseTensor")
    torch = sys.modules["torch"]
    inherited = torch.Tensor.__setstate__
    for cls in _subclasses(base):
        if "__setstate__" in vars(cls):
            draft.wrap_plain(cls, "__setstate__", following)
        elif cls.__setstate__ is inherited and hasattr(cls, "__tensor_flatten__"):
            # What torch calls in the place of that method of its own.
            draft.wrap_plain(cls, "__setstate__", lambda _: following(torch._utils._set_obj_state))


def _subclasses(base: Any) -> Iterator[Any]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)
