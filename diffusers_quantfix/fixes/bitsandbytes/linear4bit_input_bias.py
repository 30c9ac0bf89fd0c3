"""Under autocast the biases of 4-bit layers are rounded for good.

Symptom: one forward pass under ``torch.autocast`` turns the float32 biases of 4-bit layers into float16 or bfloat16
    ones: later outputs, and a checkpoint, differ. A trained bias (LoRA with ``bias="all"``) loses small steps, or
    raises ValueError "Attempting to unscale FP16 gradients.".
Cause: ``Linear4bit.forward`` stores the bias in the dtype of its input, ``self.bias.data =
    self.bias.data.to(x.dtype)``, before it converts a copy to the compute dtype.
Upstream: none; from 0.50.0 on the input has the compute dtype by then, which is ``bnb-linear4bit-bias``.
Patch: that statement is left out, and the copy gets the dtype of the converted input. Twin: ``bnb-linear8bit-bias``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import exchanged, own_function
from ...models.stored_bias import STORED, stores_bias

FIX = Fix(
    __doc__,
    id="bnb-linear4bit-input-bias",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<0.50.0"},
    harm="wrong result",
    fixed_in="bitsandbytes 0.50.0",
    hot=True,
)


def broken(modules: ModuleType) -> bool:
    """Run a layer with only a bias; without a quant state the multiplication after it fails."""
    import torch

    inputs = torch.zeros(1, 1, dtype=torch.bfloat16)
    return stores_bias(resolve(modules, "Linear4bit"), inputs, torch.float32)


def patch(modules: ModuleType, draft: Draft) -> None:
    """Replace the code of ``Linear4bit.forward``."""
    function = own_function(modules, "Linear4bit.forward")
    # Without a compute dtype, `to(None)` would leave it in its own.
    in_compute_dtype = ("self.bias.to(self.compute_dtype)", "self.bias.to(x.dtype)")
    draft.replace(function, "__code__", exchanged(function, STORED, "pass", in_compute_dtype))
