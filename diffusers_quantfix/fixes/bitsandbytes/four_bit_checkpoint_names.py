"""``torch.distributed.checkpoint`` cannot save a 4-bit model.

Symptom: AttributeError "'Params4bit' object has no attribute 'absmax'" from ``get_model_state_dict`` and
    ``get_state_dict``, also with DistributedDataParallel and when saving only a LoRA.
Cause: torch looks up each name of the state dict, step by step, as an attribute. ``Linear4bit`` writes
    ``weight.absmax`` and the like into it, and ``weight.quant_state.bitsandbytes__nf4``, and no such attributes exist.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1405, fixed in 0.50.0.
Patch: once a layer has written its state dict, it has these attributes. They are None; torch does not use them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights import params_4bit

FIX = Fix(
    __doc__,
    id="bnb-4bit-checkpoint-names",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<0.50.0"},
    patterns=("'Params4bit' object has no attribute '(nested_)?(absmax|quant_map)'",),
    frames=("checkpoint/state_dict.py", "get_(model_)?state_dict"),
    fixed_in="bitsandbytes 0.50.0",
    since="0.1.0",
)


def broken(modules: ModuleType) -> bool:
    """Let a layer of 64 weights write its state dict; does its weight have an attribute absmax?"""
    import torch

    layer_class = resolve(modules, "Linear4bit")
    # Without __init__, which needs a completely imported bitsandbytes.
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    layer.weight, layer.quant_state = params_4bit.tiny_parameter(modules)
    entries: dict[str, Any] = {}
    layer._save_to_state_dict(entries, "", False)
    return "weight.absmax" in entries and not hasattr(layer.weight, "absmax")


def patch(modules: ModuleType, draft: Draft) -> None:
    def make(original):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            original(self, destination, prefix, keep_vars)
            of_weight = f"{prefix}weight."
            for name in destination:
                if name.startswith(of_weight):
                    give(self.weight, name[len(of_weight) :])

        return _save_to_state_dict

    def give(holder: Any, path: str) -> None:
        """Make every step of the dotted ``path`` an attribute."""
        name, _, rest = path.partition(".")
        value = vars(holder).setdefault(name, None)
        if rest:
            give(value, rest)

    draft.wrap_plain(resolve(modules, "Linear4bit"), "_save_to_state_dict", make)
