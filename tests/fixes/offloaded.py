"""Tiny components and pipelines for the tests of the meta defects (`*-meta-*-device`)."""

from __future__ import annotations

import copy
import pickle

import pytest

from tests.fixes import group_offloaded
from tests.fixes.callers import spelled
from tests.rig import models

# What torch says when something is sent to, or met on, the meta device.
SHOWS = r"Cannot copy out of meta tensor; no data!|not on the expected device meta|cannot be called on meta tensors"

# A message list comes as text, or as parts of which the first is text.
_CHAT = (
    "{% for m in messages %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{{ m['content'][0]['text'] }}{% endif %} "
    "{% endfor %}"
)


def offload(*components, device="cpu"):
    """Sequential offload with accelerate itself, on plain CPU unless told otherwise."""
    from accelerate import cpu_offload

    for component in components:
        cpu_offload(component, spelled(device))


def offload_model(model, device, way: str) -> None:
    """Offload one model "sequential"ly, or in groups of one leaf."""
    if way == "sequential":
        offload(model, device=device)
    else:
        pytest.importorskip("diffusers.hooks.group_offloading", reason="came with diffusers 0.33.0")
        group_offloaded.offload(model, device, group_offloaded.LEAF)


def offload_sequentially(pipeline, device):
    """``enable_sequential_cpu_offload`` on any device; diffusers itself refuses the CPU ("cpu:0")."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        pipeline.enable_sequential_cpu_offload(device=spelled(device))
        return
    offload(
        *(part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)), device=device
    )


def tokenizer():
    """The rig's tokenizer (``w0`` ... ``w59``) with a chat template, and no inputs that CLIP does not know."""
    built = models.tokenizer()
    built.model_input_names = ["input_ids", "attention_mask"]
    built.chat_template = _CHAT
    return built


def bert(seed: int = 0):
    """A BertModel with two layers, one of the text encoders that EasyAnimate takes."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    return BertModel(
        BertConfig(
            vocab_size=models.VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    ).eval()


def llama(seed: int = 0):
    """A LlamaForCausalLM with two layers, for pipelines that let their text encoder write."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=models.VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
        )
    ).eval()
    model.generation_config.pad_token_id = 0
    return model


def small_vae():
    """An AutoencoderKL for the pipelines around Stable Diffusion."""
    return models.vae(latent_channels=4, use_quant_conv=True, use_post_quant_conv=True, shift_factor=None)


def easy_animate(name: str = "EasyAnimatePipeline"):
    """A pipeline of the EasyAnimate family that can encode prompts."""
    import diffusers

    return getattr(diffusers, name)(
        vae=None,
        text_encoder=bert(),
        tokenizer=tokenizer(),
        transformer=None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def longcat_image():
    """A LongCatImagePipeline that can rewrite and encode prompts, a few tokens at a time."""
    import diffusers

    words = tokenizer()
    pipeline = diffusers.LongCatImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=llama(),
        tokenizer=words,
        text_processor=words,
        transformer=None,
    )
    pipeline.tokenizer_max_length = 8
    return pipeline


def pix2pix_zero():
    """A StableDiffusionPix2PixZeroPipeline."""
    import diffusers

    return diffusers.StableDiffusionPix2PixZeroPipeline(
        vae=small_vae(),
        text_encoder=models.clip_text(),
        tokenizer=tokenizer(),
        unet=None,
        scheduler=diffusers.DDIMScheduler(),
        feature_extractor=None,
        safety_checker=None,
        inverse_scheduler=None,
        caption_generator=None,
        caption_processor=None,
        requires_safety_checker=False,
    )


def gligen():
    """A StableDiffusionGLIGENPipeline that fills a box of an image."""
    import diffusers

    pipeline = diffusers.StableDiffusionGLIGENPipeline(
        vae=small_vae(),
        text_encoder=models.clip_text(),
        tokenizer=tokenizer(),
        unet=models.unet(in_channels=9, attention_type="gated"),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run_gligen(pipeline):
    """One step on a 32 x 32 image; the latents."""
    import torch
    from PIL import Image

    torch.manual_seed(0)  # the pipeline draws some of its noise without the generator
    return pipeline(
        prompt="w1 w2",
        gligen_phrases=["w3"],
        gligen_boxes=[[0.0, 0.0, 0.5, 0.5]],
        gligen_inpaint_image=Image.new("RGB", (32, 32), (200, 30, 30)),
        height=32,
        width=32,
        num_inference_steps=1,
        guidance_scale=1.0,
        output_type="latent",
        return_dict=False,
        generator=torch.Generator("cpu").manual_seed(0),
    )[0]


def assert_plain_property(model, fix_id: str) -> None:
    """``model.device`` works in torch.compile without a graph break, pickle, deepcopy; the patch can be undone."""
    import torch

    import diffusers_quantfix

    def add(x):
        return x.to(model.device) + 1

    assert torch.compile(add, fullgraph=True, backend="eager")(torch.ones(1)).item() == 2
    assert pickle.loads(pickle.dumps(model)).device == copy.deepcopy(model).device == model.device
    assert "device" in type(model).device.__doc__
    offload(model)
    diffusers_quantfix.revert(fix_id)
    try:
        assert model.device.type == "meta"
    finally:
        diffusers_quantfix.apply(fix_id)
    assert model.device.type == "cpu"
