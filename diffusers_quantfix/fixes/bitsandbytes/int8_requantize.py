"""Moving an Int8Params to the GPU quantizes its int8 data again and loses the scales.

Symptom: an 8-bit weight that was moved to the CPU and back to the GPU has lost its scales (every row of SCB is 127):
    the output is wrong, without an error. A move to the CPU leaves CB and SCB on the GPU. Every move to the GPU briefly
    takes three times the memory of the weight: a 16-bit copy and a new int8 matrix.
Cause: up to 0.47.0 the parameter assumes that a weight on the CPU is not quantized yet, and its other branch passes on
    the references to CB and SCB without moving them.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1332; patched in bitsandbytes 0.48.0.
Patch: ``Int8Params.to``, which every move of a parameter calls, and ``.cuda``, which does not call it before 0.46.0:
    int8 data is moved as it is, with its SCB; CB is the moved data.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.int8_params import moved_whole

FIX = Fix(
    __doc__,
    id="bnb-int8-requantize",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<0.48.0"},
    harm="wrong result",
    patterns=("SCB is 127", "must be a floating point"),
    frames=("bitsandbytes/", "8.?bit|int8"),
    fixed_in="bitsandbytes 0.48.0",
    hot=True,
)


def broken(modules: ModuleType) -> bool:
    """Move a quantized parameter to ``meta``: does SCB stay behind?"""
    import torch

    resolve(modules, "Int8Params.to")
    weight = modules.Int8Params(torch.zeros(1, 1, dtype=torch.int8), requires_grad=False)
    weight.CB, weight.SCB = weight.data, torch.zeros(1)
    return not weight.to("meta").SCB.is_meta


def patch(modules: ModuleType, draft: Draft) -> None:
    import torch

    int8 = torch.int8
    int8_params = resolve(modules, "Int8Params")

    def make_cuda(original):
        def cuda(self, device=None, *args, **kwargs):
            if self.data.dtype != int8:
                return original(self, device, *args, **kwargs)
            return self.to("cuda" if device is None else device, *args, **kwargs)

        return cuda

    draft.wrap_plain(int8_params, "to", moved_whole)
    draft.wrap_plain(int8_params, "cuda", make_cuda)
