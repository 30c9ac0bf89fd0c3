"""QuantState.to leaves the code tensor on the old device.

Symptom: RuntimeError "Input tensors need to be on the same GPU, but found the following tensor and device combinations"
    (TypeError before 0.45.0) in a forward pass of batch 1, after a 4-bit model was moved to another GPU. Larger batches
    do not read ``code`` and work.
Cause: ``QuantState.to`` moves absmax, offset and state2, but not ``code``, the table of the 16 values.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1527, fixed in 0.45.3.
Patch: ``QuantState.to`` moves ``code`` too. Every move of a 4-bit weight calls it (``Params4bit.to``, a parent's
    ``.to``, accelerate).
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="bnb-quant-state-code",
    module="bitsandbytes.functional",
    claims={"bitsandbytes": ">=0.43.0,<0.45.3"},
    patterns=(
        "Input tensors need to be on the same GPU, but found the following tensor and device combinations",
    ),
    frames=("gemv_4bit", "bitsandbytes/functional.py:is_on_gpu"),
    fixed_in="bitsandbytes 0.45.3",
    hot=True,
)


def broken(functional: ModuleType) -> bool:
    """Move a quant state of two small tensors to ``meta``, a device that always exists."""
    import torch

    state_class = resolve(functional, "QuantState")
    resolve(functional, "QuantState.to")
    state = state_class(absmax=torch.zeros(1), code=torch.zeros(16))
    state.to("meta")
    return state.absmax.is_meta and not state.code.is_meta


def patch(functional: ModuleType, draft: Draft) -> None:
    def make(original):
        def to(self, device):
            original(self, device)
            if self.code is not None:
                self.code = self.code.to(device)

        return to

    draft.wrap_plain(resolve(functional, "QuantState"), "to", make)
