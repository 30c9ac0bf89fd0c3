"""ConsistencyDecoderVAE refuses group offloading.

Symptom: ValueError "ConsistencyDecoderVAE does not support group offloading" from ``enable_group_offload``.
Cause: its ``decode`` reads buffers of the model itself, which are onloaded when ``forward`` runs.
Upstream: https://github.com/huggingface/diffusers/pull/10503 made it refuse.
Patch: it is allowed, and ``decode`` runs between the hooks of the model.
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
    id="diffusers-consistency-decoder-group-offload",
    module="diffusers.models.autoencoders.consistency_decoder_vae",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    harm="error",
    patterns=("ConsistencyDecoderVAE does not support group offloading",),
    frames=("enable_group_offload", "ConsistencyDecoderVAE"),
    since="0.1.0",
)

_MODEL = "ConsistencyDecoderVAE"


def broken(consistency_decoder_vae: ModuleType) -> bool:
    """Does the model say that it cannot be offloaded in groups?"""
    return refuses_group_offload(consistency_decoder_vae, _MODEL)


def patch(consistency_decoder_vae: ModuleType, draft: Draft) -> None:
    def make(original):
        def decode(self, *args, **kwargs):
            return as_called(self, partial(original, self), *args, **kwargs)

        return decode

    model = resolve(consistency_decoder_vae, _MODEL)
    allow_group_offload(draft, consistency_decoder_vae, _MODEL)
    draft.wrap_plain(model, "decode", make)
