"""VQModel refuses group offloading.

Symptom: ValueError "VQModel does not support group offloading" from ``enable_group_offload`` of Kandinsky, Amused or
    Latent Diffusion, or of their autoencoder.
Cause: its quantizer reads the weight of its codebook before it calls it, so that no hook has onloaded that, and it is
    called other than by ``forward``.
Upstream: https://github.com/huggingface/diffusers/pull/10503 made it refuse.
Patch: it is allowed. ``diffusers-group-offload-attention`` onloads the codebook with its quantizer, and
    ``get_codebook_entry`` runs between the quantizer's hooks.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.allowed import allow_group_offload, refuses_group_offload
from ...offloading.called import as_called

FIX = Fix(
    __doc__,
    id="diffusers-vq-group-offload",
    module="diffusers.models.autoencoders.vq_model",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    harm="error",
    patterns=("VQModel does not support group offloading",),
    frames=("enable_group_offload", "VQModel"),
    since="0.1.0",
)

_MODEL = "VQModel"


def broken(vq_model: ModuleType) -> bool:
    """Does the model say that it cannot be offloaded in groups?"""
    return refuses_group_offload(vq_model, _MODEL)


def patch(vq_model: ModuleType, draft: Draft) -> None:
    def make(original):
        def get_codebook_entry(self, *args, **kwargs):
            return as_called(self, partial(original, self), *args, **kwargs)

        return get_codebook_entry

    allow_group_offload(draft, vq_model, _MODEL)
    draft.wrap_plain(resolve(vq_model, "VectorQuantizer"), "get_codebook_entry", make)
