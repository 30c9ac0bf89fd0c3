"""torch's MultiheadAttention cannot run under sequential offload.

Symptom: RuntimeError "Tensor on device meta is not on the expected device cuda:0!" from torch's
    ``multi_head_attention_forward`` under ``enable_sequential_cpu_offload()``: the image encoders of FramePack,
    HunyuanVideo 1.5 and Flux Redux (SigLIP), and ControlNetUnion.
Cause: ``attach_align_device_hook`` gives the attention's inner layer ``out_proj`` a separate hook, which onloads the
    weight when that layer is called. It never is: torch's function reads its weight. accelerate has
    ``preload_module_classes`` for such classes, but diffusers passes none.
Upstream: https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/hooks.py#L491; not reported.
Patch: it becomes one of these classes: its hook also onloads the weights of the layers inside it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import is_plain

FIX = Fix(
    __doc__,
    id="accelerate-attention-offload",
    module="accelerate.hooks",
    claims={"accelerate": ">=0.34.2,<=1.15.0"},
    patterns=(
        r"multi_head_attention_forward.{0,4000}Tensor on device meta is not on the expected device",
        r"Tensor on device meta is not on the expected device.{0,200}(multi_?head_?attention|siglip)",
    ),
    frames=("functional.py:multi_head_attention_forward", "accelerate/hooks.py:new_forward"),
    since="0.1.0",
)


def broken(hooks: ModuleType) -> bool:
    """Offload one; does its inner layer have a separate hook?"""
    import torch

    attention = torch.nn.MultiheadAttention(1, 1)
    attach = resolve(hooks, "attach_align_device_hook")
    attach(attention, torch.device("cpu"), offload=True, weights_map=attention.state_dict())
    return hasattr(attention.out_proj, "_hf_hook")


def patch(hooks: ModuleType, draft: Draft) -> None:
    def make(original):
        def attach_align_device_hook(module, *args, **kwargs):
            if _reads_weights_of_its_layer(module):
                known = kwargs.get("preload_module_classes") or ()
                kwargs["preload_module_classes"] = [*known, type(module).__name__]
            return original(module, *args, **kwargs)

        return attach_align_device_hook

    draft.wrap_plain(hooks, "attach_align_device_hook", make)


def _reads_weights_of_its_layer(module: Any) -> bool:
    # A quantized inner layer is called (by the model's own fix): its own hook onloads its weight.
    return isinstance(module, sys.modules["torch"].nn.MultiheadAttention) and is_plain(module.out_proj)
