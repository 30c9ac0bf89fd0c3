"""Custom Diffusion cannot run with quantized layers.

Symptom: RuntimeError "mat1 and mat2 must have the same dtype, but got Byte and BFloat16", or "Expected query, key, and
    value to have the same dtype", from Custom Diffusion's processors on a 4-bit or 8-bit UNet.
Cause: they cast their input, the keys and the values to the dtype of ``attn.to_q.weight``: uint8 or int8.
Upstream: not reported.
Patch: if that weight is packed, they see one with the dtype of their input instead.
"""

from __future__ import annotations

import functools
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import LayerCalled, packed_stand_in, with_floating_weights
from ...surroundings import on_meta

FIX = Fix(
    __doc__,
    id="diffusers-custom-diffusion-dtype",
    module="diffusers.models.attention_processor",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    since="0.1.0",
    patterns=(
        r"attention_processor.{0,2000}(must|to) have the same dtype.{0,200}(Byte|Char|unsigned|signed)",
        r"CustomDiffusion.{0,400}same dtype",
    ),
    frames=("diffusers/models/attention_processor.py:__call__", "CustomDiffusion"),
    hot=True,
)

_CLASSES = (
    "CustomDiffusionAttnProcessor",
    "CustomDiffusionAttnProcessor2_0",
    "CustomDiffusionXFormersAttnProcessor",
)


def broken(attention_processor: ModuleType) -> bool:
    """Which dtype does a layer with a packed weight get?"""
    import torch

    with on_meta():
        # diffusers' own Attention cannot be created yet: its module is imported by one that it needs
        attention = torch.nn.Module()
        attention.prepare_attention_mask = lambda *_: None
        attention.to_q = packed_stand_in(1)
        try:
            processor = resolve(attention_processor, _CLASSES[0])(train_kv=False, train_q_out=False)
            processor(attention, torch.empty(1, 1, 1))
        except LayerCalled as called:
            return not called.dtype.is_floating_point
    return False


def patch(attention_processor: ModuleType, draft: Draft) -> None:
    def make(original):
        # diffusers reads its parameter names to learn which arguments a processor accepts
        @functools.wraps(original)
        def __call__(self, attn, hidden_states, *args, **kwargs):
            seen = with_floating_weights(attn, "to_q", dtype=hidden_states.dtype)
            return original(self, seen, hidden_states, *args, **kwargs)

        return __call__

    for name in _CLASSES:
        draft.wrap_plain(resolve(attention_processor, name), "__call__", make)
