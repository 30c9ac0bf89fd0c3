"""A text encoder from a checkpoint quantized by torchao is written with ``torch.save``."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import torchao_model

    return torchao_model.written_and_read(work)
