"""The dtype of a quantized model without biases is that of its LoRA, or an integer type.

Symptom: RuntimeError "Input type (float) and bias type (c10::BFloat16) should be the same" from the VAE, after
    ``load_lora_weights`` of a float32 LoRA into an 8-bit Flux.2; if nothing raises, the model runs in float32. From a
    4-bit Flux.3 NotImplementedError "silu_cpu" (or "silu_cuda") "not implemented for 'Byte'", even without a LoRA.
Cause: ``ModelMixin.dtype`` is that of the first floating parameter. 8-bit weights are integers; if the layers before
    the first norm have no biases, the first one is the adapter's, and bitsandbytes leaves adapters in float32.
    Parameters kept in float32 are skipped; if they are the only floating ones, as in Flux.3, the dtype is that of the
    packed weights.
Upstream: not reported.
Patch: ``get_parameter_dtype`` skips adapter parameters if there is another floating parameter or a 4-bit weight.
    Instead of an integer dtype it returns the one the 4-bit weights had before, else that of the parameters kept in
    float32.
"""

from __future__ import annotations

import sys
from types import ModuleType

from ...engine.draft import Draft
from ...engine.errors import Undecided
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.parameter_dtype import TUNERS, floating
from ...surroundings import on_meta

FIX = Fix(
    __doc__,
    id="diffusers-adapter-dtype",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "peft": ""},
    patterns=(r"flux2.{1,4000}Input type \(float\) and bias type \(c10::\w+\) should be the same",),
    frames=("pipeline_flux2", "autoencoder_kl_flux2.py", "lora"),
    since="0.1.0",
    hot=True,
)


def broken(modeling_utils: ModuleType) -> bool:
    """Get the dtype of an integer layer with an adapter, followed by a norm."""
    function = resolve(modeling_utils, "get_parameter_dtype")
    if TUNERS not in sys.modules:
        raise Undecided(TUNERS)
    torch, tuners = modeling_utils.torch, sys.modules[TUNERS]
    layer = type("Layer", (torch.nn.Module, tuners.BaseTunerLayer), {})()
    with on_meta():
        layer.base_layer = torch.nn.Module()
        layer.base_layer.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False)
        layer.lora_A = torch.nn.Linear(1, 1)
        model = torch.nn.Sequential(layer, torch.nn.LayerNorm(1, dtype=torch.bfloat16))
    model._keep_in_fp32_modules = None  # 0.33.1 to 0.34.0 read it from every model
    return bool(function(model) == torch.float32)


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(modeling_utils, "get_parameter_dtype", floating)
