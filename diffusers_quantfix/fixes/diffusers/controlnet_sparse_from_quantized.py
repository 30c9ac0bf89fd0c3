"""A sparse ControlNet that is made of a quantized UNet has wrong weights: diffusers 0.31.

Symptom: no error, but ``SparseControlNetModel.from_unet`` gives layers with the bytes of an 8-bit weight
    for numbers, or with random numbers where optimum-quanto has quantized the UNet.
Cause: the weights are copied with ``load_state_dict(..., strict=False)``, which passes over names that do not fit, and
    writes whatever has the right shape.
Upstream: not reported. From 0.32 on the class is elsewhere: see ``diffusers-controlnet-from-quantized``.
Patch: a ValueError before anything is made. Layers with a LoRA are copied without it, unless it is fused.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...models.copied_weights import guard, unguarded

FIX = Fix(
    id="diffusers-controlnet-sparse-from-quantized",
    title="a sparse ControlNet that is made of a quantized UNet has wrong weights",
    module="diffusers.models.controlnet_sparsectrl",
    claims={"diffusers": ">=0.31.0,<0.32.0"},
    upstream=(
        "https://github.com/huggingface/diffusers/blob/v0.31.0/src/diffusers/models/controlnet_sparsectrl.py#L443",
    ),
    symptom="noise from a sparse ControlNet after SparseControlNetModel.from_unet() of a quantized UNet",
    harm="wrong result",
    frames=("SparseControlNetModel", r"\b0\.31"),
    fixed_in="diffusers 0.32.0",  # in another module there: diffusers-controlnet-from-quantized
    since="0.1.0",
)


def broken(controlnet_sparsectrl: ModuleType) -> bool:
    return unguarded(controlnet_sparsectrl)


def patch(controlnet_sparsectrl: ModuleType, draft: Draft) -> None:
    guard(controlnet_sparsectrl, draft)
