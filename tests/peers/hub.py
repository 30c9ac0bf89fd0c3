"""A folder in the layout of the Hub's cache, with tiny random models under the names that the tests ask for.

    python -m tests.peers.hub FOLDER     # in the environment that will read it

The shapes are those that the tests count (twelve layers of opt-125m), everything else is small.  A test that judges
the words or the quality of a trained model fails on them, on both sides alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 1024
_REVISION = "0" * 40


def _language(config: str, model: str, pickled: bool = False, **sizes: Any) -> Callable[[Path], None]:
    """A maker of a model of transformers with a tokenizer; ``pickled``: with a file of the old kind as well."""

    def make(folder: Path) -> None:
        import torch
        import transformers

        torch.manual_seed(0)
        made = getattr(transformers, model)(
            getattr(transformers, config)(**{"vocab_size": VOCABULARY, **sizes})
        )
        made.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
        if pickled:
            torch.save(made.state_dict(), folder / "pytorch_model.bin")

    return make


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "</s>", *(chr(32 + number) for number in range(95))]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", bos_token="</s>"
    )


def _stable_diffusion(folder: Path) -> None:
    import diffusers
    import torch
    import transformers

    torch.manual_seed(0)
    text = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=37, num_hidden_layers=5,
        num_attention_heads=4, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    channels = (32, 64)
    pipeline = diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(
            block_out_channels=channels, latent_channels=4,
            down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        ),
        unet=diffusers.UNet2DConditionModel(
            block_out_channels=channels, layers_per_block=2, sample_size=32, cross_attention_dim=32,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        text_encoder=transformers.CLIPTextModel(text), tokenizer=_tokenizer(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(folder)


# Few words and large weights: several tests ask whether an adapter changes the probability of a word by 0.001.
_OPT = {"ffn_dim": 128, "num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": 1,
        "bos_token_id": 2, "eos_token_id": 2, "vocab_size": 128, "init_std": 0.2,
        "hidden_size": 64, "word_embed_proj_dim": 64}  # fmt: skip
_LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 4, "pad_token_id": 1}  # fmt: skip
_BLOOM = {"hidden_size": 64, "n_head": 4, "pad_token_id": 1}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
_opt_12 = _language("OPTConfig", "OPTForCausalLM", num_hidden_layers=12, **_OPT)
_opt_2 = _language("OPTConfig", "OPTForCausalLM", num_hidden_layers=2, **_OPT)
_llama = _language("LlamaConfig", "LlamaForCausalLM", **_LLAMA)
_bloom = _language("BloomConfig", "BloomForCausalLM", pickled=True, n_layer=24, **_BLOOM)
_t5 = _language("T5Config", "T5ForConditionalGeneration", **_T5)

MODELS: dict[str, Callable[[Path], None]] = {
    "peft-internal-testing/opt-125m": _opt_12,
    "facebook/opt-125m": _opt_12,
    "facebook/opt-350m": _opt_2,
    "peft-internal-testing/tiny-random-OPTForCausalLM": _opt_2,
    "hf-internal-testing/tiny-random-OPTForCausalLM": _opt_2,
    "peft-internal-testing/tiny-random-LlamaForCausalLM": _llama,
    "trl-internal-testing/tiny-random-LlamaForCausalLM": _llama,
    "HuggingFaceH4/tiny-random-LlamaForCausalLM": _llama,
    "bigscience/bloom-560m": _bloom,
    "bigscience/bloom-1b7": _bloom,
    "bigscience/bloomz-560m": _bloom,
    "marcsun13/bloom-1b7_with_lm_head": _bloom,
    "peft-internal-testing/tiny-random-BloomForCausalLM": _bloom,
    "google/flan-t5-base": _t5,
    "google/flan-t5-small": _t5,
    "peft-internal-testing/tiny-random-t5": _t5,
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration": _t5,
    "openai/whisper-large": _language(
        "WhisperConfig", "WhisperForConditionalGeneration", d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        pad_token_id=1, bos_token_id=2, eos_token_id=2, decoder_start_token_id=2,
    ),
    "peft-internal-testing/tiny-random-BertModel": _language(
        "BertConfig", "BertModel", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    ),
    "gpt2": _language("GPT2Config", "GPT2LMHeadModel", n_embd=64, n_layer=12, n_head=4),
    "peft-internal-testing/tiny-random-gpt2": _language(
        "GPT2Config", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4
    ),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": _language(
        "BartConfig", "BartForConditionalGeneration", d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
    ),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": _language(
        "RobertaConfig", "RobertaForSequenceClassification", hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=64,
    ),
    "peft-internal-testing/tiny-clip-text-2": _language(
        "CLIPTextConfig", "CLIPTextModel", hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, pad_token_id=1, bos_token_id=2, eos_token_id=2,
    ),
    "hf-internal-testing/Mixtral-tiny": _language(
        "MixtralConfig", "MixtralForCausalLM", num_local_experts=4, **_LLAMA
    ),
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": _language(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", num_experts=4, moe_intermediate_size=32, head_dim=16, **_LLAMA
    ),
    "hf-internal-testing/tiny-sd-pipe": _stable_diffusion,
}  # fmt: skip


def make(home: Path) -> None:
    """Write every model into ``home/hub``, as huggingface_hub would have downloaded it.

    A model that this environment cannot make is left out, with a line on standard error.
    """
    for name, maker in MODELS.items():
        write(home, name, maker)


def write(home: Path, name: str, maker: Callable[[Path], None]) -> None:
    """Write one model, or say on standard error that this environment cannot make it."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / _REVISION
    snapshot.mkdir(parents=True, exist_ok=True)
    try:
        maker(snapshot)
    except Exception as error:
        print(f"no {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(_REVISION)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
