"""A group-offloaded text encoder keeps the embeddings from before a textual inversion.

Symptom: IndexError "index out of range in self" (on CUDA "device-side assert triggered") from the embedding of a text
    encoder under leaf-level group offload with a stream, after ``load_textual_inversion()``; RuntimeError "Expected all
    tensors to be on the same device" without a stream, after ``unload_textual_inversion()``.
Cause: the embedding gets a larger weight, or is replaced. The groups keep a host copy of the weight from before, and
    have nothing for a new module; for a LoRA, diffusers sets them up once more.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/textual_inversion.py#L396; not
    reported.
Patch: the groups of a text encoder whose embedding has changed are set up once more, as for a LoRA. Before 0.35.0
    nothing can do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from ...adapters.token_embeddings import text_encoders
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...engine.versions import is_installed
from ...finishing import finished_after
from ...offloading.hooks import group_again, group_config

FIX = Fix(
    __doc__,
    id="diffusers-textual-inversion-group-offload",
    module="diffusers.loaders.textual_inversion",
    claims={"diffusers": ">=0.35.0,<=0.42.1"},
    patterns=(
        r"(token_embedding|inputs_embeds|embed_tokens).{0,2000}(IndexError: index out of range in self|"
        r"device-side assert triggered|Expected all tensors to be on the same device)",
    ),
    frames=(
        "load_textual_inversion",
        "unload_textual_inversion",
        "token_embedding|embed_tokens",
        "group_offload",
    ),
    asked_once=True,
)

_METHODS = ("load_textual_inversion", "unload_textual_inversion")


def broken(textual_inversion: ModuleType) -> bool:
    """Does it leave the groups as they were, where they can be set up once more?"""
    load = resolve(textual_inversion, "TextualInversionLoaderMixin.load_textual_inversion")
    known = "_maybe_remove_and_reapply_group_offloading" in names_used(load)
    return not known and is_installed("diffusers", ">=0.35.0")


def patch(textual_inversion: ModuleType, draft: Draft) -> None:
    def make(original):
        def load_or_unload(self, *args, **kwargs):
            encoders = text_encoders(self, (*args, *kwargs.values()))
            before = [(one, _embedding(one), group_config(one)) for one in encoders]

            def steps() -> Iterator[Callable[[], Any]]:
                for encoder, embedding, config in before:
                    if _embedding(encoder) != embedding:
                        yield partial(group_again, encoder, config)

            return finished_after(partial(original, self, *args, **kwargs), steps)

        return load_or_unload

    mixin = resolve(textual_inversion, "TextualInversionLoaderMixin")
    for name in _METHODS:
        draft.wrap_plain(mixin, name, make)


def _embedding(encoder: Any) -> tuple[int, Any]:
    """Which module the embedding of ``encoder`` is, and the shape of its weight."""
    module = encoder.get_input_embeddings()
    return id(module), getattr(getattr(module, "weight", None), "shape", None)
