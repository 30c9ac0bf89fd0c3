"""DiT refuses group offloading.

Symptom: ValueError "DiTTransformer2DModel does not support group offloading" from ``enable_group_offload``, quantized
    or not.
Cause: at its end ``forward`` calls an embedding of its first block, ``transformer_blocks[0].norm1.emb``, which is
    onloaded with that block, and offloaded after it.
Upstream: https://github.com/huggingface/diffusers/pull/10503 made it refuse.
Patch: it is allowed. Offloaded by blocks, the group of the first block is onloaded for that call.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import InPlaceOf
from ...offloading.allowed import allow_group_offload, refuses_group_offload
from ...offloading.called import called_with
from ...offloading.direct_calls import DirectCall

FIX = Fix(
    __doc__,
    id="diffusers-dit-group-offload",
    module="diffusers.models.transformers.dit_transformer_2d",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    harm="error",
    patterns=("DiTTransformer2DModel does not support group offloading",),
    frames=("enable_group_offload", "DiTTransformer2DModel|DiTPipeline"),
    since="0.1.0",
    hot=True,
)

_MODEL = "DiTTransformer2DModel"


def broken(dit_transformer_2d: ModuleType) -> bool:
    """Does the model say that it cannot be offloaded in groups?"""
    return refuses_group_offload(dit_transformer_2d, _MODEL)


def patch(dit_transformer_2d: ModuleType, draft: Draft) -> None:
    def make(original):
        def forward(self, *args, **kwargs):
            blocks = self.transformer_blocks
            registry = vars(blocks[0]).get("_diffusers_hook")
            hook = registry and registry.get_hook("group_offloading")
            if hook is None:
                return original(self, *args, **kwargs)
            return original(InPlaceOf(self, {"transformer_blocks": _Blocks(blocks, hook)}), *args, **kwargs)

        return forward

    model = resolve(dit_transformer_2d, _MODEL)
    allow_group_offload(draft, dit_transformer_2d, _MODEL)
    draft.wrap_plain(model, "forward", make)


class _Blocks:
    """The blocks of a model; the embedding of the one that is got by its number may be called while ``hook`` has
    offloaded its group."""

    def __init__(self, blocks: Any, hook: Any) -> None:
        self._blocks = blocks
        self._hook = hook

    def __iter__(self) -> Iterator[Any]:
        return iter(self._blocks)

    def __getitem__(self, number: int) -> Any:
        block = self._blocks[number]
        embedding = partial(called_with, DirectCall(self._hook), block.norm1.emb)
        return InPlaceOf(block, {"norm1": InPlaceOf(block.norm1, {"emb": embedding})})
