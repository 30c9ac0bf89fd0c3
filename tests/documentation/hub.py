"""A Hub cache with tiny random models under the names that the libraries' documentation uses.

python -m tests.documentation.hub FOLDER     # in the environment that will read it
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.peers.hub import MODELS, write

# Name on the Hub -> class of the pipeline that is saved there (`tests.pipelines.build`).
PIPELINES = {
    "stabilityai/stable-diffusion-xl-base-1.0": "StableDiffusionXLPipeline",
    "RunDiffusion/Juggernaut-XL-v9": "StableDiffusionXLPipeline",
    "stable-diffusion-v1-5/stable-diffusion-v1-5": "StableDiffusionPipeline",
    "runwayml/stable-diffusion-v1-5": "StableDiffusionPipeline",
    "stabilityai/stable-diffusion-3-medium-diffusers": "StableDiffusion3Pipeline",
    "black-forest-labs/FLUX.1-dev": "FluxPipeline",
    "black-forest-labs/Flux.1-Dev": "FluxPipeline",
    "black-forest-labs/FLUX.1-schnell": "FluxPipeline",
    "Qwen/Qwen-Image": "QwenImagePipeline",
    "THUDM/CogVideoX-5b": "CogVideoXPipeline",
    "THUDM/CogVideoX-2b": "CogVideoXPipeline",
    "Lightricks/LTX-Video": "LTXPipeline",
    "black-forest-labs/FLUX.2-klein-4B": "Flux2KleinPipeline",
    "hunyuanvideo-community/HunyuanVideo": "HunyuanVideoPipeline",
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": "SanaPipeline",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "WanPipeline",
    "Lightricks/LTX-Video-0.9.5": "LTXConditionPipeline",
    "Tongyi-MAI/Z-Image-Turbo": "ZImagePipeline",
    "Tongyi-MAI/Z-Image": "ZImagePipeline",
    "PixArt-alpha/PixArt-XL-2-1024-MS": "PixArtAlphaPipeline",
}

# Name of a LoRA -> (name of its pipeline, its file)
_SDXL, _FLUX = "stabilityai/stable-diffusion-xl-base-1.0", "black-forest-labs/FLUX.1-dev"
LORAS = {
    "ostris/super-cereal-sdxl-lora": (_SDXL, "cereal_box_sdxl_v1.safetensors"),
    "ostris/ikea-instructions-lora-sdxl": (_SDXL, "ikea_instructions_xl_v1_5.safetensors"),
    "lordjia/by-feng-zikai": (_SDXL, "fengzikai_v1.0_XL.safetensors"),
    "jbilcke-hf/sdxl-cinematic-1": (_SDXL, "pytorch_lora_weights.safetensors"),
    "benjamin-paine/steamboat-willie-14b": (
        "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        "steamboat-willie-14b.safetensors",
    ),
    "Lightricks/LTX-Video-Cakeify-LoRA": ("Lightricks/LTX-Video-0.9.5", "ltxv_095_cakeify_lora.safetensors"),
    "alvarobartt/ghibli-characters-flux-lora": (_FLUX, "ghibli-characters-flux-lora.safetensors"),
}

# Name of a GGUF file's repository -> (name of its pipeline, its file)
GGUF = {
    "sayakpaul/different-lora-from-civitai": (_FLUX, "flux_dev_diffusers-q4_0.gguf"),
}


# Name of a language model of transformers' and PEFT's documentation -> the name of the one that it is here
LANGUAGE = {
    "bigscience/bloom-1b7": "bigscience/bloom-1b7",
    "bigscience/bloom-560m": "bigscience/bloom-560m",
    "facebook/opt-125m": "facebook/opt-125m",
    "facebook/opt-350m": "facebook/opt-350m",
    "meta-llama/Llama-3.1-8B-Instruct": "peft-internal-testing/tiny-random-LlamaForCausalLM",
    "meta-llama/Llama-2-13b-chat-hf": "peft-internal-testing/tiny-random-LlamaForCausalLM",
    "mistralai/Mistral-7B-v0.1": "peft-internal-testing/tiny-random-LlamaForCausalLM",
}


def make(home: Path) -> None:
    """Write every model into ``home/hub``, as huggingface_hub would have downloaded it.

    A model that this environment cannot make is left out, with a line on standard error.
    """
    for name, kind in PIPELINES.items():
        write(home, name, lambda folder, kind=kind: _pipeline(kind, folder))
    for name, (of, file) in GGUF.items():
        write(home, name, lambda folder, of=of, file=file: _gguf(PIPELINES[of], folder / file))
    for name, (of, file) in LORAS.items():
        write(home, name, lambda folder, of=of, file=file: _lora(PIPELINES[of], folder / file))
    for name, of in LANGUAGE.items():
        write(home, name, MODELS[of])


def _pipeline(kind: str, folder: Path) -> None:
    import torch

    from tests.pipelines import build

    torch.manual_seed(0)
    pipe = build.pipeline(kind, torch.float32)
    if kind == "CogVideoXPipeline":  # its prompts are padded to the length that the transformer is made for
        made = pipe.transformer
        pipe.transformer = type(made).from_config({**made.config, "max_text_seq_length": 226})
    if kind == "QwenImagePipeline":  # a cache of the first block needs others
        made = pipe.transformer
        pipe.transformer = type(made).from_config({**made.config, "num_layers": 3})
    if kind == "Flux2KleinPipeline":  # its blocks read the 27th layer
        made = pipe.text_encoder
        made.config.num_hidden_layers, made.config.layer_types = 27, None
        pipe.text_encoder = type(made)(type(made.config)(**made.config.to_dict()))
    pipe.save_pretrained(folder)
    if kind == "StableDiffusionXLPipeline":
        pipe.save_pretrained(folder, variant="fp16")


def _gguf(kind: str, file: Path) -> None:
    """The transformer in Q4_0, under diffusers' names."""
    import torch

    from tests.pipelines import build, gguf_files

    torch.manual_seed(0)
    gguf_files.write(build.pipeline(kind, torch.float32).transformer, file.parent)
    (file.parent / gguf_files.NAME).rename(file)


def _lora(kind: str, file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from tests.pipelines import build, lora

    torch.manual_seed(0)
    save_file(lora.weights(build.pipeline(kind, torch.float32)), file)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
