"""CLAP cannot run under sequential offload.

Symptom: NotImplementedError "Cannot copy out of meta tensor; no data!" in ``text_encoder.get_text_features`` of
    AudioLDM 2 after ``enable_sequential_cpu_offload()``, quantized or not.
Cause: ``ClapTextModel.forward`` reads the buffer ``embeddings.token_type_ids``, and accelerate's hook of ``embeddings``
    brings its tensors for ``embeddings.forward`` only. Until then the buffer is on meta: diffusers offloads the buffers
    of a model that has parameters of its own, as CLAP has.
Upstream: https://github.com/huggingface/transformers/blob/v5.3.0/src/transformers/models/clap/modeling_clap.py; fixed
    in 5.4.0, where ``embeddings.forward`` reads it.
Patch: if the buffer is on meta and nothing is given instead, its zeros are made where the input is.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="transformers-clap-token-types",
    module="transformers.models.clap.modeling_clap",
    claims={"transformers": ">=4.44.2,<5.4"},
    fixed_in="transformers 5.4.0",
    patterns=(r"modeling_clap.{0,6000}Cannot copy out of meta tensor",),
    frames=(
        "modeling_clap.py:(get_text_features|forward)",
        "pipeline_audioldm2.py:encode_prompt",
        "get_text_features",
        "CLAP|[Cc]lap",
    ),
    since="0.1.0",
    hot=True,
)

_BUFFER = "token_type_ids"


class _Embedded(Exception):
    """The embeddings were asked for."""


def broken(modeling_clap: ModuleType) -> bool:
    """Do the embeddings get a buffer of theirs that is on meta?"""
    import torch

    cls = resolve(modeling_clap, "ClapTextModel")
    if not {"embeddings", _BUFFER} <= names_used(resolve(cls, "forward")):
        return False

    class Embeddings(torch.nn.Module):
        token_type_ids = torch.empty((1, 1), dtype=torch.long, device="meta")

        def forward(self, *args: Any, token_type_ids: Any = None, **kwargs: Any) -> None:
            raise _Embedded(token_type_ids is not None and token_type_ids.is_meta)

    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    model.config = resolve(modeling_clap, "ClapTextConfig")(vocab_size=1, hidden_size=1, num_hidden_layers=1)
    model.embeddings, model.encoder = Embeddings(), torch.nn.Identity()
    model.weight = torch.nn.Parameter(torch.empty(1, dtype=torch.float32, device="meta"))
    try:
        model(torch.ones((1, 1), dtype=torch.long, device="cpu"))
    except _Embedded as said:
        return bool(said.args[0])
    return False


def patch(modeling_clap: ModuleType, draft: Draft) -> None:
    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            buffer = getattr(self.embeddings, _BUFFER, None)
            if buffer is not None and buffer.is_meta:
                args, kwargs = _with_zeros(buffer, args, kwargs)
            return original(self, *args, **kwargs)

        return forward

    draft.wrap_plain(resolve(modeling_clap, "ClapTextModel"), "forward", make)


def _with_zeros(
    buffer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with zeros instead of the buffer, where it would be read."""
    names = ("input_ids", "attention_mask", _BUFFER, "position_ids", "inputs_embeds")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    ids: Any = given.get("input_ids")
    embeds: Any = given.get("inputs_embeds")
    # Upstream itself refuses both, and neither.
    if given.get(_BUFFER) is not None or (ids is None) == (embeds is None):
        return args, kwargs
    like = ids if ids is not None else embeds[..., 0]
    zeros = like.new_zeros(like.shape, dtype=buffer.dtype)
    if len(args) > names.index(_BUFFER):
        return (*args[:2], zeros, *args[3:]), kwargs
    return args, {**kwargs, _BUFFER: zeros}
