"""A DoRA adapter for an 8-bit layer on the CPU loses the layer's weight.

Symptom: after a DoRA is loaded into an 8-bit model that is on the CPU (offloaded, for example), every targeted
    ``base_layer.weight`` is on ``meta``: NotImplementedError "Cannot copy out of meta tensor; no data!", or noise.
Cause: ``dequantize_module_weight`` ends with ``module.weight = module.weight.to(device)`` for a weight on the CPU.
    diffusers and ``low_cpu_mem_usage=True`` call it within ``init_empty_weights``, where every assigned parameter goes
    to ``meta``.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/utils/integrations.py; not reported.
Patch: the layer gets its own weight back, the same object.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve

FIX = Fix(
    __doc__,
    id="peft-dora-8bit-cpu",
    module="peft.utils.integrations",
    claims={"peft": ">=0.13.2,<=0.21.2", "bitsandbytes": ""},
    patterns=("Cannot copy out of meta tensor; no data",),
    frames=(r"\bdora\b|use_dora", "peft/|load_lora_weights", "8.?bit|int8"),
    hot=True,
    asked_once=True,
)


def broken(integrations: ModuleType) -> bool:
    """Does it assign the layer's weight?"""
    import dis

    function = resolve(integrations, "dequantize_module_weight")
    return any(
        step.opname == "STORE_ATTR" and step.argval == "weight"
        for step in dis.get_instructions(function_of(function))
    )


def patch(integrations: ModuleType, draft: Draft) -> None:
    def make(original):
        def dequantize_module_weight(module):
            weight = module._parameters.get("weight")
            device = None if weight is None else weight.device
            try:
                return original(module)
            finally:
                now = module._parameters.get("weight")
                if weight is not None and now is not weight:
                    if weight.device == device:
                        module._parameters["weight"] = weight
                    elif now is not None and now.is_meta:  # kernels of old releases move the weight itself
                        module._parameters["weight"] = weight.to(device)

        return dequantize_module_weight

    draft.wrap_plain(integrations, "dequantize_module_weight", make)
