"""8-bit transformers models refuse to move between devices.

Symptom: ValueError "Calling `cuda()` is not supported for `8-bit` quantized models." while ``.to("cuda")`` works;
    before 5.0.0 also "`.to` is not supported for `8-bit` bitsandbytes models", so an 8-bit text encoder stays on the
    GPU and ``enable_model_cpu_offload`` skips it.
Cause: ``PreTrainedModel.cuda`` and ``.to`` raise for 8-bit models. 5.0.0 allows only ``.to``, for bitsandbytes >=
    0.48.0.
Upstream: https://github.com/huggingface/transformers/pull/43258 (5.0.0) for ``.to``; ``.cuda`` is open.
Patch: both methods allow an 8-bit model to move if the whole model moves (``bnb-linear8bit-move``), or to the device it
    is already on; a call without a device (``to(memory_format=...)``) passes. Casts, and moves of models that are
    spread over devices or offloaded, are left to upstream.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve, texts_of
from ...models import eight_bit_model

FIX = Fix(
    __doc__,
    id="transformers-8bit-cuda",
    module="transformers.modeling_utils",
    claims={"transformers": ">=4.44.2,<=5.24.0", "bitsandbytes": ">=0.43.0"},
    patterns=(
        r"Calling (cuda\(\) )?is not supported for (4-bit or )?(8-bit |or )?quantized models(?! with the installed)",
        r"\.to\b.{0,40} (4-bit .{1,3} )8-bit bitsandbytes",
        r"\.to is not supported for 8-bit",
        "is not supported for or bitsandbytes models",
    ),
    frames=("transformers/modeling_utils.py", "4-bit .{1,2} 8-bit"),
    asked_once=True,
)

_REFUSALS = ("is not supported for `8-bit`", "is not supported for `4-bit` or `8-bit`")


def broken(modeling_utils: ModuleType) -> bool:
    """Look for the message: building a model here would import too much."""
    cuda = resolve(modeling_utils, "PreTrainedModel.cuda")
    return any(refusal in texts_of(cuda) for refusal in _REFUSALS)


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    eight_bit_model.open_gates(resolve(modeling_utils, "PreTrainedModel"), draft)
