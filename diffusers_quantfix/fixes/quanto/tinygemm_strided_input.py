"""quanto int4 weights in bfloat16 do not accept input that is not contiguous.

Symptom: RuntimeError "_weight_int4pack_mm_cpu : expect A to be contiguous.", or on a GPU "Expected A.is_contiguous() to
    be true", from a layer with ``qint4`` weights in bfloat16 that gets a part of each row (``states.chunk(2, -1)``) or
    a transposed tensor. ``torch.nn.Linear`` accepts any input.
Cause: the TinyGemm kernels take contiguous rows only, and the function passes the input on as it is.
Upstream: not reported; as https://github.com/huggingface/optimum-quanto/issues/327 for other weights.
Patch: the function gets a contiguous copy if the input is not contiguous.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.strided_input import asks_no_layout, contiguous

FIX = Fix(
    __doc__,
    id="quanto-tinygemm-strided-input",
    module="optimum.quanto.tensor.weights.tinygemm.qbits",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(
        "_weight_int4pack_mm_cpu : expect A to be contiguous",
        r"tinygemm.{0,2000}Expected A\.is_contiguous\(\) to be true",
    ),
    frames=("quanto/tensor/weights/tinygemm/qbits.py:forward",),
    hot=True,
    asked_once=True,
)

_FUNCTION = "TinyGemmQBitsLinearFunction"


def broken(qbits: ModuleType) -> bool:
    return asks_no_layout(resolve(qbits, f"{_FUNCTION}.forward"))


def patch(qbits: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(resolve(qbits, _FUNCTION), "forward", contiguous)
