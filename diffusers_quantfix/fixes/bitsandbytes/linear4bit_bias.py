"""The first run of a 4-bit model changes its dtype, and the next output.

Symptom: the same seed gives a different image in the second call of a 4-bit pipeline; ``model.dtype`` changes after the
    first call; a model that has run is saved with rounded biases. Affects models whose dtype is not
    ``bnb_4bit_compute_dtype``: float16 or bfloat16 models with the default, float32, too.
Cause: ``Linear4bit.forward`` first converts the input to the compute dtype, and then stores the bias in the input's
    dtype, ``bias.data = bias.data.to(x.dtype)``. The dtype of a model is that of its parameters, and pipelines give the
    denoiser its inputs in that dtype.
Upstream: none.
Patch: that statement of ``Linear4bit.forward`` converts a copy: ``bias = bias.to(x.dtype)``. A wrapper would add a call
    to every run, and two threads in one layer would conflict.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import exchanged, own_function
from ...models.stored_bias import stores_bias

FIX = Fix(
    __doc__,
    id="bnb-linear4bit-bias",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.50.0,<=0.50.2"},
    harm="wrong result",
    hot=True,
)


def broken(modules: ModuleType) -> bool:
    """Run a layer with only a bias; without a quant state the multiplication after it fails."""
    import torch

    return stores_bias(resolve(modules, "Linear4bit"), torch.zeros(1, 1), torch.bfloat16)


def patch(modules: ModuleType, draft: Draft) -> None:
    """Replace the code of ``Linear4bit.forward``."""
    function = own_function(modules, "Linear4bit.forward")
    old = "bias.data = bias.data.to(x.dtype)"
    draft.replace(function, "__code__", exchanged(function, old, "bias = bias.to(x.dtype)"))
