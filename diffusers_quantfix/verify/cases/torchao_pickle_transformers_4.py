"""A text encoder from a checkpoint quantized by torchao is written with ``torch.save``, with transformers 4."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import torchao_model

    return torchao_model.written_and_read(work)
