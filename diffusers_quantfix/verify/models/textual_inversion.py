"""A pipeline with a text encoder that a textual inversion is loaded into."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def pipeline() -> Any:
    """A FluxPipeline with a CLIP text encoder of 64 features and two tokens, float32 on the CPU."""
    from tokenizers import Tokenizer, models
    from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

    from . import lora

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1}, unk_token="[UNK]"))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "projection_dim": 64, "vocab_size": 2}
    return lora.pipeline(
        text_encoder=CLIPTextModel(CLIPTextConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"),
    )
