"""An adapter cannot be loaded into an 8-bit model without memory for it.

Symptom: NotImplementedError "Cannot copy out of meta tensor; no data!" from ``load_lora_weights`` of a pipeline with an
    8-bit model, from ``load_lora_adapter`` of such a model, or from ``PeftModel.from_pretrained(...,
    low_cpu_mem_usage=True)``.
Cause: a layer with a ``state``, as those of bitsandbytes in 8 bits have, is moved with its new adapter to where it is.
    With ``low_cpu_mem_usage=True``, diffusers' default, the adapter is on ``meta`` until its data is loaded.
Upstream: https://github.com/huggingface/diffusers/issues/10550, closed by https://github.com/huggingface/peft/pull/2325
    in 0.15.0, which takes that statement away for LoRA only. Since 0.18 the same statement of ``BaseTuner`` is that of
    LoKr and others.
Patch: an adapter on ``meta`` stays there until its data comes, as that of any other layer does.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.new_layers import empty_layers_stay, moves_empty_layers
from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve

_CLASSES = {"model": "LoraModel", "tuners_utils": "BaseTuner"}

FIX = Fix(
    __doc__,
    id="peft-8bit-empty-adapters",
    targets=(
        Target(
            "peft-8bit-empty-adapter",
            "peft.tuners.tuners_utils",
            {"peft": ">=0.18.0,<=0.21.2", "bitsandbytes": ""},
        ),
        Target(
            "peft-8bit-empty-lora",
            "peft.tuners.lora.model",
            {"peft": ">=0.13.2,<0.15.0", "bitsandbytes": ""},
            fixed_in="peft 0.15.0",
        ),
    ),
    patterns=("Cannot copy out of meta tensor; no data",),
    frames=(
        "load_lora_weights|peft/tuners/(lokr|loha)",
        "peft/tuners/lora/|lokr|loha",
        "8.?bit|int8",
    ),
)


def broken(module: ModuleType) -> bool:
    """Give it a layer with a ``state`` and an adapter on meta."""
    return moves_empty_layers(resolve(_tuner(module), "_replace_module"))


def patch(module: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(_tuner(module), "_replace_module", empty_layers_stay)


def _tuner(module: ModuleType) -> type:
    cls: type = resolve(module, _CLASSES[module.__name__.rpartition(".")[2]])
    return cls
