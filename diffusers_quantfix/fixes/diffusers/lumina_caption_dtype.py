"""Lumina-Next cannot run with a quantized transformer.

Symptom: RuntimeError or NotImplementedError "silu_cpu", or on a GPU "silu_cuda", not implemented for 'Byte' or 'Char',
    from ``LuminaText2ImgPipeline`` whose transformer is in 4-bit or 8-bit or comes from a GGUF file.
Cause: ``LuminaCombinedTimestepCaptionEmbedding.forward`` casts the time embedding to the dtype of
    ``timestep_embedder.linear_1.weight``: uint8 or int8.
Upstream: https://github.com/huggingface/diffusers/pull/10347, in 0.33.0, casts it to the dtype of the caption.
Patch: if that weight is packed, ``forward`` sees one with the dtype of the caption instead.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import InPlaceOf, LayerCalled, packed_stand_in, with_floating_weights
from ...surroundings import on_meta

FIX = Fix(
    __doc__,
    id="diffusers-lumina-caption-dtype",
    module="diffusers.models.embeddings",
    claims={"diffusers": ">=0.31.0,<0.33.0"},
    patterns=(r"silu_(cpu|cuda)\W? not implemented for '(Byte|Char)'",),
    frames=("lumina_nextdit2d.py", "pipeline_lumina.py", "Lumina"),
    fixed_in="diffusers 0.33.0",
    since="0.1.0",
    hot=True,
)

_CLASS = "LuminaCombinedTimestepCaptionEmbedding"


def broken(embeddings: ModuleType) -> bool:
    """Which dtype does a layer with a packed weight get?"""
    import torch

    with on_meta():
        embedding = resolve(embeddings, _CLASS)(1, 1, 2)
        embedding.timestep_embedder.linear_1 = packed_stand_in(1)
        try:
            embedding(torch.empty(1), torch.empty(1, 1, 1), torch.empty(1, 1))
        except LayerCalled as called:
            return not called.dtype.is_floating_point
    return False


def patch(embeddings: ModuleType, draft: Draft) -> None:
    def make(original):
        def forward(self, timestep, caption_feat, caption_mask):
            embedder = self.timestep_embedder
            seen = with_floating_weights(embedder, "linear_1", dtype=caption_feat.dtype)
            if seen is embedder:
                return original(self, timestep, caption_feat, caption_mask)
            return original(
                InPlaceOf(self, {"timestep_embedder": seen}), timestep, caption_feat, caption_mask
            )

        return forward

    draft.wrap_plain(resolve(embeddings, _CLASS), "forward", make)
