"""Kandinsky 2.2 cannot run with a quantized UNet.

Symptom: RuntimeError "mixed dtype (CPU): all inputs must share same datatype", or NotImplementedError "batch_norm" or
    "LayerNormKernelImpl" not implemented for 'Char' or 'Byte', from every UNet whose ``encoder_hid_dim_type`` is
    "image_proj", in 4-bit or 8-bit or from a GGUF file.
Cause: ``ImageProjection.forward`` casts the image embedding to the dtype of its layer's weight, uint8 or int8: the
    embedding is destroyed, and the layer returns integers too.
Upstream: not reported.
Patch: if the weight is packed, ``forward`` sees a weight with the dtype of the layer's bias instead.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import LayerCalled, packed_stand_in, with_floating_weights
from ...surroundings import on_meta

FIX = Fix(
    __doc__,
    id="diffusers-image-projection-dtype",
    module="diffusers.models.embeddings",
    claims={"diffusers": ">=0.32.0,<=0.42.1"},
    since="0.1.0",
    patterns=(
        r"mixed dtype \(CPU\): all inputs must share same datatype",
        r"(batch_norm|LayerNormKernelImpl)'? not implemented for '(Char|Byte)'",
    ),
    frames=("diffusers/models/embeddings.py:forward", "ImageProjection", "image_proj", "Kandinsky"),
    hot=True,
)


def broken(embeddings: ModuleType) -> bool:
    """Which dtype does a layer with a packed weight get?"""
    import torch

    with on_meta():
        projection = resolve(embeddings, "ImageProjection")(1, 1, 1)
        projection.image_embeds = packed_stand_in(1)
        try:
            projection(torch.empty(1, 1))
        except LayerCalled as called:
            return not called.dtype.is_floating_point
    return False


def patch(embeddings: ModuleType, draft: Draft) -> None:
    def make(original):
        def forward(self, *args, **kwargs):
            return original(with_floating_weights(self, "image_embeds"), *args, **kwargs)

        return forward

    draft.wrap_plain(resolve(embeddings, "ImageProjection"), "forward", make)
