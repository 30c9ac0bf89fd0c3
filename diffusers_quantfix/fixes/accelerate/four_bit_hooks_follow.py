"""After a move, hooks send a 4-bit model's inputs to its old device.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:1 and
    cuda:0!" in the embedding of an nf4 text encoder that was sent to the second GPU.
Cause: ``dispatch_model`` of accelerate before 1.2 puts hooks on every module of a quantized model, also on one device.
    They send the inputs to the device on which it was loaded. bitsandbytes can move 4-bit layers since 0.43.2, and
    transformers allows it since 4.45; nothing updates the hooks.
Upstream: https://github.com/huggingface/accelerate/pull/3223, in 1.2.0, puts no hooks on them.
Patch: after a move of such a model, its hooks send the inputs to the new device. They are not removed, since programs
    written for these releases give inputs on the CPU.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...models.following import follow

FIX = Fix(
    __doc__,
    id="accelerate-4bit-hooks-follow",
    module="accelerate.big_modeling",
    claims={"accelerate": ">=0.34.2,<1.2", "bitsandbytes": ">=0.43.2"},
    patterns=("Expected all tensors to be on the same device",),
    frames=("4.?bit|nf4", r"text_encoder.{0,30}cuda:[1-9]", "functional.py:embedding"),
    fixed_in="accelerate 1.2.0",
    asked_once=True,
    since="0.1.0",
)


def broken(big_modeling: ModuleType) -> bool:
    """Does ``dispatch_model`` treat 4-bit models like all quantized ones?"""
    return "is_loaded_in_4bit" not in names_used(resolve(big_modeling, "dispatch_model"))


def patch(big_modeling: ModuleType, draft: Draft) -> None:
    def make(original):
        def dispatch_model(model, device_map, *args, **kwargs):
            model = original(model, device_map, *args, **kwargs)
            if len(set(device_map.values())) == 1:
                follow(model, _is_4bit)
            return model

        return dispatch_model

    draft.wrap_plain(big_modeling, "dispatch_model", make)


def _is_4bit(model: Any) -> bool:
    """transformers says only after the dispatch that it is a 4-bit model."""
    return bool(getattr(model, "is_loaded_in_4bit", False))
