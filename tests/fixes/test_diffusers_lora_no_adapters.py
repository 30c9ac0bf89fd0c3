"""diffusers-lora-no-adapters: a LoRA for ControlNet-XS and for PRX, which have no model that takes one."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models import control_xs, lora
from tests.rig import models

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-lora-no-adapters"
SHOWS = r"has no attribute '(load_lora_adapter|load_attn_procs|unet)'"


def state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def refused(pipe, weights, model):
    """A LoRA is refused in one sentence, and neither it nor the model has changed."""
    before, names, modules = state(model), dict(weights), [type(one) for one in model.modules()]
    with pytest.raises(ValueError, match=rf"{type(pipe).__name__} cannot load a LoRA: .+\. .+\.$"):
        pipe.load_lora_weights(weights, adapter_name="one")
    after = state(model)
    assert list(weights) == list(names)
    assert [type(one) for one in model.modules()] == modules
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_control_net_xs():
    pipe = control_xs.pipeline(control_xs.unet())
    for _ in range(2):
        refused(pipe, lora.weights(pipe.unet, "unet"), pipe.unet)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_control_net_xs_of_sdxl():
    names = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "controlnet", "feature_extractor")
    pipe = diffusers.StableDiffusionXLControlNetXSPipeline(
        **dict.fromkeys(names),
        unet=control_xs.unet(),
        vae=diffusers.AutoencoderKL(),
        scheduler=diffusers.EulerDiscreteScheduler(),
        add_watermarker=False,
    )
    refused(pipe, lora.weights(pipe.unet, "unet"), pipe.unet)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_quantized_one(gpu, tmp_path):
    source = control_xs.unet()
    models.saved(source, tmp_path)
    pipe = control_xs.pipeline(models.load_quantized(type(source), tmp_path, 4, dtype=torch.float16))
    refused(pipe, lora.weights(source, "unet"), pipe.unet)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.36")
def test_prx():
    try:
        pipeline = diffusers.PRXPipeline
    except (ImportError, RuntimeError):
        pytest.skip("it cannot be imported without ftfy")
    torch.manual_seed(0)
    model = diffusers.PRXTransformer2DModel(
        hidden_size=64, num_heads=2, axes_dim=[16, 16], depth=1, context_in_dim=64, in_channels=4
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = pipeline(model, scheduler, text_encoder=None, tokenizer=None, vae=None)
    refused(pipe, lora.weights(model, "transformer", ("img_qkv_proj",)), model)


def test_an_error_of_the_program_is_not_reworded():
    """An AttributeError of something else comes out as it is."""
    pipe = control_xs.pipeline(control_xs.unet())

    class Own:
        def copy(self):
            return self.missing

    with pytest.raises(AttributeError, match="missing"):
        pipe.lora_state_dict = lambda *args, **kwargs: Own().copy()
        pipe.load_lora_weights({})


def test_a_unet_loads_as_before():
    from diffusers_quantfix.verify.models.unet import unet

    pipe = diffusers.StableDiffusionPipeline(
        **dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor")),
        unet=unet(),
        vae=diffusers.AutoencoderKL(),
        scheduler=diffusers.DDIMScheduler(),
        requires_safety_checker=False,
    )
    pipe.load_lora_weights(lora.weights(pipe.unet, "unet"), adapter_name="one")
    assert pipe.get_list_adapters() == {"unet": ["one"]}
