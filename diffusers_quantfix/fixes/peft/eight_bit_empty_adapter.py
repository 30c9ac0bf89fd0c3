"""A LoKr cannot be loaded into an 8-bit model without memory for it.

Symptom: NotImplementedError "Cannot copy out of meta tensor; no data!" from ``load_lora_adapter`` of an 8-bit model,
    or from ``PeftModel.from_pretrained(..., low_cpu_mem_usage=True)`` of one, with an adapter that is no LoRA.
Cause: that of ``peft-8bit-empty-lora``. peft PR 2325 corrected it for LoRA only.
Upstream: peft PR 2325.
Patch: an adapter on ``meta`` stays there until its data comes, as that of any other layer does.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.new_layers import empty_layers_stay, moves_empty_layers
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    id="peft-8bit-empty-adapter",
    title="a LoKr cannot be loaded into an 8-bit model without memory for it",
    module="peft.tuners.tuners_utils",
    claims={"peft": ">=0.18.0,<=0.21.2", "bitsandbytes": ""},
    upstream=("https://github.com/huggingface/peft/pull/2325",),
    symptom="NotImplementedError: Cannot copy out of meta tensor; no data!, with a LoKr for an 8-bit model",
    patterns=("Cannot copy out of meta tensor; no data",),
    frames=("peft/tuners/(lokr|loha)", "lokr|loha", "8.?bit|int8"),
)


def broken(tuners_utils: ModuleType) -> bool:
    """Give it a layer with a ``state`` and an adapter on meta."""
    return moves_empty_layers(resolve(tuners_utils, "BaseTuner._replace_module"))


def patch(tuners_utils: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(resolve(tuners_utils, "BaseTuner"), "_replace_module", empty_layers_stay)
