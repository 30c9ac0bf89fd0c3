"""``torch.distributed.checkpoint`` cannot save an 8-bit model.

Symptom: AttributeError "'Linear8bitLt' object has no attribute 'SCB'" from ``get_model_state_dict`` and
    ``get_state_dict``, also with DistributedDataParallel and when saving only a LoRA.
Cause: torch looks up each name of the state dict as an attribute. ``Linear8bitLt`` writes ``SCB`` and ``weight_format``
    into it and has neither.
Upstream: not reported; for 4-bit weights bitsandbytes 0.50.0 added such attributes.
Patch: once a layer has written its state dict, it has these two attributes. They are None; torch does not use them.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="bnb-int8-checkpoint-names",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    patterns=("'Linear8bitLt' object has no attribute '(SCB|weight_format)'",),
    frames=("checkpoint/state_dict.py", "get_(model_)?state_dict"),
    since="0.1.0",
)

_NAMES = ("SCB", "weight_format")


def broken(modules: ModuleType) -> bool:
    """Let a layer write its state dict; does it have an attribute SCB?"""
    import torch

    layer_class = resolve(modules, "Linear8bitLt")
    # Without __init__, which needs a completely imported bitsandbytes.
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    layer.weight = modules.Int8Params(torch.zeros(1, 1, dtype=torch.int8), requires_grad=False)
    layer.weight.SCB = torch.zeros(1)
    layer.state = State()
    entries: dict[str, object] = {}
    layer._save_to_state_dict(entries, "", False)
    return "SCB" in entries and not hasattr(layer, "SCB")


class State:
    """The probe's stand-in for a ``MatmulLtState``."""

    CxB = CB = SCB = None
    formatB = "row"
    has_fp16_weights = False


def patch(modules: ModuleType, draft: Draft) -> None:
    def make(original):
        def _save_to_state_dict(self, *args, **kwargs):
            original(self, *args, **kwargs)
            for name in _NAMES:
                vars(self).setdefault(name, None)

        return _save_to_state_dict

    draft.wrap_plain(resolve(modules, "Linear8bitLt"), "_save_to_state_dict", make)
