"""Quantized SigLIP 2 sees nothing of its image.

Symptom: a Siglip2VisionModel in 4 or 8 bits (Z-Image-Omni has one) gives almost the same embedding for every image, or
    ends in an error about dtypes in its first layer.
Cause: ``Siglip2VisionEmbeddings.forward`` casts the pixels to the dtype of ``patch_embedding.weight``, a Linear's:
    uint8 or int8, which keeps only the integer part of values between -1 and 1.
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
    id="transformers-siglip2-patch-dtype",
    module="transformers.models.siglip2.modeling_siglip2",
    claims={"transformers": ">=4.50.0,<=5.24.0"},
    harm="wrong result",
    since="0.1.0",
    hot=True,
)


def broken(modeling_siglip2: ModuleType) -> bool:
    """Which dtype does a layer with a packed weight get?"""
    import torch

    config = resolve(modeling_siglip2, "Siglip2VisionConfig")
    with on_meta():
        embeddings = resolve(modeling_siglip2, "Siglip2VisionEmbeddings")(
            config(hidden_size=1, num_channels=1, patch_size=1, num_patches=1)
        )
        embeddings.patch_embedding = packed_stand_in(1)
        try:
            embeddings(torch.empty(1, 1, 1), torch.empty(1, 2))
        except LayerCalled as called:
            return not called.dtype.is_floating_point
    return False


def patch(modeling_siglip2: ModuleType, draft: Draft) -> None:
    def make(original):
        def forward(self, *args, **kwargs):
            return original(with_floating_weights(self, "patch_embedding"), *args, **kwargs)

        return forward

    draft.wrap_plain(resolve(modeling_siglip2, "Siglip2VisionEmbeddings"), "forward", make)
