"""EasyAnimatePipeline encodes a prompt with an offloaded text encoder; with older diffusers, the encoder alone does."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    BertModel(config).save_pretrained(work)
    _tokenizer().save_pretrained(work)

    reference, _ = _encode(BertModel.from_pretrained(work).eval(), work)
    encoder = BertModel.from_pretrained(work).eval()
    cpu_offload(encoder, torch.device("cpu"))
    embeddings, who = _encode(encoder, work)
    error = (embeddings - reference).abs().max().item()
    assert error == 0, f"maximum error of the embeddings of the offloaded text encoder: {error:.3g}"
    return (
        f"the device of the offloaded encoder is {encoder.device}, where it runs; embeddings of {who} exact"
    )


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "a", "cat", "on", "the", "mat"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'][0]['text'] }}{% endfor %}"
    return tokenizer


def _encode(encoder: Any, work: str) -> tuple[Any, str]:
    """(embeddings, the name of what computed them) for one prompt."""
    import torch
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(work)
    with torch.no_grad():
        try:
            from diffusers import EasyAnimatePipeline, FlowMatchEulerDiscreteScheduler
        except ImportError:  # diffusers before 0.33, or none
            ids = tokenizer("a cat on the mat", return_tensors="pt").input_ids
            return encoder(ids.to(encoder.device)).last_hidden_state, "the text encoder"
        pipe = EasyAnimatePipeline(
            vae=None,
            text_encoder=encoder,
            tokenizer=tokenizer,
            transformer=None,
            scheduler=FlowMatchEulerDiscreteScheduler(),
        )
        embeddings = pipe.encode_prompt(
            "a cat on the mat", do_classifier_free_guidance=False, max_sequence_length=16
        )
        return embeddings[0], "EasyAnimatePipeline"
