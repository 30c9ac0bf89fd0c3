"""Merging a LoRA into an 8-bit model on the CPU raises if there is a GPU.

Symptom: RuntimeError "Expected all tensors to be on the same device" from ``merge_adapter()`` of an 8-bit model on the
    CPU, or from ``fuse_lora()`` under ``enable_model_cpu_offload``, where the model is on the CPU between runs.
Cause: ``dequantize_bnb_weight`` first moves a CPU weight to the GPU, but not its scales in ``layer.state``.
Upstream: https://github.com/huggingface/peft/pull/2820, https://github.com/huggingface/peft/pull/3418; patched in peft
    0.18.0, which leaves the weight where it is; 0.20.0 moves the scales too.
Patch: for a weight on the CPU the function gets a copy of the state with the scales on the device it moves the weight
    to. The layer and its state are not changed.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve
from ...offloading.live import merged_adapters as in_use  # noqa: F401

FIX = Fix(
    __doc__,
    id="peft-8bit-dequantize-cpu",
    module="peft.utils.integrations",
    claims={"peft": ">=0.14.0,<0.18.0", "bitsandbytes": ""},
    patterns=("Expected all tensors to be on the same device",),
    frames=("dequantize_bnb_weight", "peft/", "8.?bit|int8"),
    fixed_in="peft 0.18.0",
    asked_once=True,
)


def broken(integrations: ModuleType) -> bool:
    """Does it move a weight to the GPU and multiply it there?"""
    function = resolve(integrations, "dequantize_bnb_weight")
    code = function_of(function).__code__
    return (
        "cuda" in (*code.co_names, *code.co_consts)
        and "igemmlt" not in code.co_names  # before 0.14, where a different kernel computes it
    )


def patch(integrations: ModuleType, draft: Draft) -> None:
    import copy

    import torch

    def make(original):
        def dequantize_bnb_weight(weight, state=None):
            if type(weight).__name__ == "Int8Params" and weight.device.type == "cpu" and state is not None:
                scales = weight.SCB if state.SCB is None else state.SCB
                device = where_weights_are_taken()
                if scales is not None and device is not None:
                    state = copy.copy(state)
                    state.SCB = scales.to(device)
            return original(weight, state)

        return dequantize_bnb_weight

    def where_weights_are_taken():
        for kind in ("cuda", "xpu"):
            accelerator = getattr(torch, kind, None)
            if accelerator is not None and accelerator.is_available():
                return torch.device(kind)
        return None

    draft.wrap_plain(integrations, "dequantize_bnb_weight", make)
