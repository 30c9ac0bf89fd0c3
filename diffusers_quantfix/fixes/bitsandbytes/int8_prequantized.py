"""A checkpoint saved in 8-bit produces noise.

Symptom: noise or NaN, without any error, from an 8-bit model loaded from a pre-quantized checkpoint, on a GPU and on
    the CPU.
Cause: ``Int8Params.to`` sets CB on its result only if the parameter had one. A parameter made from the int8 data of a
    checkpoint has none yet, and the layer treats its int8 matrix as one that still has to be quantized.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1775, patched by
    https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1776 in 0.48.1.
Patch: int8 data is moved as ``bnb-int8-requantize`` does it for older releases: CB is the moved data.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.int8_params import moved_whole

FIX = Fix(
    __doc__,
    id="bnb-int8-prequantized",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.48.0,<0.48.1"},
    harm="wrong result",
    patterns=("'NoneType' object has no attribute 'data_ptr'",),
    frames=("bitsandbytes/", "8.?bit|int8"),
    fixed_in="bitsandbytes 0.48.1",
    hot=True,
)


def broken(modules: ModuleType) -> bool:
    """Move a parameter as created by loading, and one that has a CB: does only the second one get a CB?"""
    import torch

    resolve(modules, "Int8Params.to")
    weight = modules.Int8Params(torch.zeros(1, 1, dtype=torch.int8), requires_grad=False)
    if weight.to("meta").CB is not None:
        return False
    weight.CB = weight.data
    # Older releases leave CB on the old device, and quantize int8 data when it moves to a GPU: bnb-int8-requantize.
    return bool(weight.to("meta").CB.is_meta)


def patch(modules: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(resolve(modules, "Int8Params"), "to", moved_whole)
