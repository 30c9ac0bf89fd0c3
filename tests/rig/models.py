"""Tiny random models, and the libraries' own way to save them and load them quantized. No network.

Every Linear dimension is a multiple of 64, which all quantization kernels accept. Everything is imported when it is
called for, because each release set has other libraries.
"""

from __future__ import annotations

import copy
from pathlib import Path

from diffusers_quantfix.verify.models.flux import transformer as flux_transformer
from diffusers_quantfix.verify.models.t5 import VOCABULARY
from diffusers_quantfix.verify.models.t5 import encoder as t5_encoder
from diffusers_quantfix.verify.models.unet import unet as unet
from diffusers_quantfix.verify.models.vae import vae


def clip_text(seed: int = 0):
    """A CLIPTextModel with two layers."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(seed)
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            projection_dim=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=77,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
        )
    ).eval()


def tokenizer(max_length: int = 77):
    """A tokenizer built in memory; it knows the words ``w0`` to ``w59``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", *(f"w{i}" for i in range(VOCABULARY - 4))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        model_max_length=max_length,
    )


def flux_pipeline(transformer=None, text: bool = False, **components):
    """A FluxPipeline around ``transformer``; with ``text`` it has text encoders, tokenizers and a VAE as well."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    names = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    parts = dict.fromkeys(names)
    if text:
        parts = dict(zip(names, (vae(), clip_text(), tokenizer(), t5_encoder(), tokenizer()), strict=True))
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=flux_transformer() if transformer is None else transformer,
        **{**parts, **components},
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def call_flux(pipeline, device=None, dtype=None, steps: int = 1):
    """The latents of one run with fixed embeddings and noise, which are given on ``device`` (the transformer's)."""
    import torch

    generator = torch.Generator("cpu").manual_seed(0)
    device = pipeline.transformer.device if device is None else device
    dtype = dtype or torch.float16
    return pipeline(
        prompt_embeds=torch.randn(1, 8, 64, generator=generator).to(device, dtype),
        pooled_prompt_embeds=torch.randn(1, 64, generator=generator).to(device, dtype),
        **_small_run(steps),
    )[0]


def prompt_flux(pipeline, prompt: str = "w1 w2 w3", steps: int = 1):
    """The latents of one run from a prompt, for a pipeline with text encoders."""
    return pipeline(prompt, max_sequence_length=16, **_small_run(steps))[0]


def _small_run(steps: int) -> dict:
    import torch

    return {
        "height": 32,
        "width": 32,
        "num_inference_steps": steps,
        "guidance_scale": 1.0,
        "output_type": "latent",
        "return_dict": False,
        "generator": torch.Generator("cpu").manual_seed(0),
    }


def saved(model, folder) -> Path:
    """Save a model or a pipeline and return its folder."""
    model.save_pretrained(folder)
    return Path(folder)


def bnb_config(library: str, bits: int = 4, **options):
    """The ``BitsAndBytesConfig`` of ``library`` (diffusers or transformers); nf4 without double quantization."""
    import importlib

    import torch

    if bits == 4:
        defaults = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": torch.float16,
        }
    else:
        defaults = {"load_in_8bit": True}
    return importlib.import_module(library).BitsAndBytesConfig(**{**defaults, **options})


def load_quantized(model_class, folder, bits: int = 4, device_map=None, dtype=None, **options):
    """``model_class.from_pretrained`` with bitsandbytes: ``options`` are those of ``bnb_config``."""
    import torch

    library = model_class.__module__.partition(".")[0]
    placement = {} if device_map is None else {"device_map": copy.deepcopy(device_map)}
    return model_class.from_pretrained(
        folder,
        quantization_config=bnb_config(library, bits, **options),
        torch_dtype=dtype or torch.float16,
        **placement,
    )
