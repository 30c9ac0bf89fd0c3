"""``torch.load`` with a dict of devices leaves quanto weights on two devices.

Symptom: after ``torch.load(file, map_location={"cuda:0": "cuda:1"})`` RuntimeError "Expected all tensors to be on the
    same device"; ``.to("cuda:0")`` moves nothing.
Cause: torch looks up a wrapper's device by ``torch.device`` in a dict whose keys are strings. The inner tensors go
    where the dict says, but the wrapper still reports the saved device.
Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_utils.py#L131; not reported.
Patch: an unpickled quanto tensor reports the device of its inner tensors.
"""

from __future__ import annotations

import sys
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.wrappers import following, is_torn_by_a_map

FIX = Fix(
    __doc__,
    id="quanto-load-map",
    module="optimum.quanto.tensor.weights",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(
        r"map_location.{0,2000}quanto.{0,4000}Expected all tensors to be on the same device",
        r"Expected all tensors to be on the same device.{0,400}map_location.{0,400}quanto",
    ),
    frames=("map_location", "quanto"),
    hot=True,
    since="0.1.0",
    asked_once=True,
)


def broken(weights: ModuleType) -> bool:
    resolve(weights, "WeightQBytesTensor")
    return is_torn_by_a_map()


def patch(weights: ModuleType, draft: Draft) -> None:
    import torch

    def make(original):
        # What torch does if a class has no such method.
        return following(torch._utils._set_obj_state)

    draft.wrap_plain(sys.modules["optimum.quanto.tensor.qtensor"].QTensor, "__setstate__", make)
