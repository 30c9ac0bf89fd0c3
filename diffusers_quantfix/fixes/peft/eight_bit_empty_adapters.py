"""An adapter with empty weights (on meta) cannot be loaded into an 8-bit model.

Symptom: NotImplementedError "Cannot copy out of meta tensor; no data!" from ``load_lora_weights`` of a pipeline with an
    8-bit model, from ``load_lora_adapter`` of such a model, or from ``PeftModel.from_pretrained(...,
    low_cpu_mem_usage=True)``.
Cause: a layer with a ``state``, such as an 8-bit bitsandbytes layer, is moved with its new adapter to its own device.
    With ``low_cpu_mem_usage=True``, diffusers' default, the adapter is on ``meta`` until its data is loaded.
Upstream: https://github.com/huggingface/diffusers/issues/10550, closed by https://github.com/huggingface/peft/pull/2325
    in 0.15.0, which removes that statement for LoRA only. Since 0.18 LoKr and others use the same statement in
    ``BaseTuner``.
Patch: an adapter on ``meta`` stays there until its data is loaded, as on any other layer.
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
    """Pass it a layer with a ``state`` and an adapter on meta."""
    return moves_empty_layers(resolve(_tuner(module), "_replace_module"))


def patch(module: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(_tuner(module), "_replace_module", empty_layers_stay)


def _tuner(module: ModuleType) -> type:
    cls: type = resolve(module, _CLASSES[module.__name__.rpartition(".")[2]])
    return cls
