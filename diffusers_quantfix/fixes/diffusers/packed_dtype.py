"""The dtype of a quantized model is that of its packed weights.

Symptom: NotImplementedError "silu_cpu" (or "silu_cuda") "not implemented for 'Byte'" from aMUSEd in nf4, and from any
    other whose first layer is quantized; its ``dtype`` is ``torch.uint8`` or ``torch.int8``. A pipeline that makes its
    inputs in that dtype rounds them, without an error.
Cause: ``ModelMixin.dtype`` is that of the first parameter.
Upstream: https://github.com/huggingface/diffusers/pull/10342, in 0.32.0, takes the first floating parameter.
Patch: ``get_parameter_dtype`` returns the dtype that the 4-bit weights had before, else that of the first floating
    parameter that is no adapter's.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.parameter_dtype import floating
from ...surroundings import on_meta

FIX = Fix(
    __doc__,
    id="diffusers-packed-dtype",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.31.0,<0.32.0"},
    harm="wrong result",
    patterns=(r"silu_(cpu|cuda).{1,3} not implemented for 'Byte'",),
    frames=("4.?bit|nf4|8.?bit", r"\.dtype\b", "amused|uvit_2d"),
    fixed_in="diffusers 0.32.0",
    since="0.1.0",
    hot=True,
)


def broken(modeling_utils: ModuleType) -> bool:
    """Get the dtype of an integer layer that is followed by a norm."""
    function = resolve(modeling_utils, "get_parameter_dtype")
    torch = modeling_utils.torch
    with on_meta():
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False)
        model = torch.nn.Sequential(layer, torch.nn.LayerNorm(1))
    model._keep_in_fp32_modules = None  # 0.33.1 to 0.34.0 read it from every model
    return not function(model).is_floating_point


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(modeling_utils, "get_parameter_dtype", floating)
