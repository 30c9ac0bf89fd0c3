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

import contextlib
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import exchanged, own_function

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

    layer_class = resolve(modules, "Linear4bit")
    # Without __init__, which needs a completely imported bitsandbytes.
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.zeros(1, 1), requires_grad=False)
    layer.weight.quant_state = object()
    layer.bias = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    layer.compute_dtype, layer.compute_type_is_set = torch.bfloat16, True
    layer.support_avx512bf16_for_cpu = False
    with contextlib.suppress(AttributeError, AssertionError, TypeError, RuntimeError):
        layer(torch.zeros(1, 1))
    return bool(layer.bias.dtype != torch.float32)


def patch(modules: ModuleType, draft: Draft) -> None:
    """Replace the code of ``Linear4bit.forward``."""
    function = own_function(modules, "Linear4bit.forward")
    old = "bias.data = bias.data.to(x.dtype)"
    draft.replace(function, "__code__", exchanged(function, old, "bias = bias.to(x.dtype)"))
