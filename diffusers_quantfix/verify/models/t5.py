"""The tiny T5 text encoder of the cases and tests."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


VOCABULARY = 64


def config() -> Any:
    """A T5Config with two layers."""
    from transformers import T5Config

    return T5Config(vocab_size=VOCABULARY, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2)


def encoder(seed: int = 0) -> Any:
    """A random T5EncoderModel, float32 on the CPU."""
    import torch
    from transformers import T5EncoderModel

    torch.manual_seed(seed)
    return T5EncoderModel(config()).eval()
