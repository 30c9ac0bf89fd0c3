"""A textual inversion is loaded into a group-offloaded text encoder."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import group_offload, textual_inversion

    pipe = textual_inversion.pipeline()
    encoder = pipe.text_encoder
    group_offload.apply(encoder, torch.device("cpu"))
    before = _group(encoder)
    pipe.load_textual_inversion({"<new>": torch.ones(64)})
    assert _group(encoder) is not before, (
        "the group of the embedding is that from before, with its copy of the weight"
    )
    with torch.no_grad():
        output = encoder(torch.tensor([[0, 1, 2]])).last_hidden_state
    assert torch.isfinite(output).all()
    return "the embedding is in a new group, and the text encoder runs"


def _group(encoder: object) -> object:
    from diffusers.hooks import HookRegistry

    embedding = encoder.get_input_embeddings()  # type: ignore[attr-defined]
    return HookRegistry.check_if_exists_or_initialize(embedding).get_hook("group_offloading").group
