"""diffusers-balanced-passed-component: ``device_map`` ignores components that are passed to the pipeline."""

from __future__ import annotations

import contextlib
import inspect

import pytest

from tests.fixes import four_bit
from tests.fixes.test_diffusers_balanced import config_of
from tests.gate import unmet
from tests.marks import rest_is_long
from tests.rig import models

FIX_ID = "diffusers-balanced-passed-component"
SHOWS = r"on the same device|on the same GPU|is not where hf_device_map says|has no place"
# Each GPU has room for the transformer (522 880 bytes) and one text encoder.
MEMORY = {0: 650_000, 1: 650_000}
METHODS = ("plain", "nf4", "int8", "quanto", "torchao")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("passed") / "pipeline"
    models.flux_pipeline(text=True, vae=None).save_pretrained(path)
    return path


def component(folder, name: str, method: str, where: str | None = None, **options):
    """A component of the saved pipeline, loaded as the documentation of each quantization library does it."""
    import torch
    from diffusers import FluxTransformer2DModel
    from transformers import T5EncoderModel

    transformer = name == "transformer"
    if method != "plain":
        options["quantization_config"] = config_of(method, "diffusers" if transformer else "transformers")
    if where is not None:
        options["device_map"] = {"": where}
    dtype = torch.bfloat16 if method == "torchao" else torch.float16
    # Before 0.33 a quantized model of diffusers takes no device_map, and is loaded onto the current device.
    current = contextlib.nullcontext()
    if where is not None and method != "plain" and transformer and unmet("diffusers>=0.33"):
        current = torch.cuda.device(options.pop("device_map")[""])
    with current, four_bit.skip_for_other_reasons():
        return (FluxTransformer2DModel if transformer else T5EncoderModel).from_pretrained(
            folder / name, torch_dtype=dtype, **options
        )


def pipeline(folder, cls=None, **options):
    import diffusers
    import torch

    dtype = options.pop("dtype", torch.float16)
    cls = cls or diffusers.FluxPipeline
    pipe = cls.from_pretrained(folder, torch_dtype=dtype, vae=None, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def assert_map_is_right(pipe, **expected: str) -> None:
    """Every model of the pipeline is where ``hf_device_map`` says, those that are named on that device."""
    import torch

    for name, model in pipe.components.items():
        if isinstance(model, torch.nn.Module):
            assert name in pipe.hf_device_map, f"{name} has no place: {pipe.hf_device_map}"
            place = pipe.hf_device_map[name]
            there = {str(tensor.device) for tensor in model.parameters()}
            wanted = {expected.get(name, "meta" if place == "cpu" else f"cuda:{place}")}
            said = wanted if place == "cpu" else {f"cuda:{place}"}
            assert there == wanted == said, f"{name} is not where hf_device_map says: {there}, {place}"


@pytest.mark.parametrize("where", [None, "cuda:0", "cuda:1"])
@pytest.mark.parametrize("name", rest_is_long(["transformer", "text_encoder_2"], "transformer"))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_passed_component(rig_devices, folder, method, name, where):
    """On a GPU it stays there, even if the plan may not use that GPU; on the CPU it goes where the plan says."""
    import torch

    model = component(folder, name, method, where)
    before = {str(tensor.device) for tensor in model.parameters()}
    memory = {"cpu": MEMORY, "cuda:0": {1: 2_000_000}, "cuda:1": {0: 2_000_000}}["".join(before)]
    dtype = torch.bfloat16 if method == "torchao" else torch.float16
    pipe = pipeline(folder, dtype=dtype, device_map="balanced", max_memory=memory, **{name: model})
    assert getattr(pipe, name) is model
    assert_map_is_right(pipe, **({} if before == {"cpu"} else {name: next(iter(before))}))
    result = models.prompt_flux(pipe)
    reference = pipeline(folder, dtype=dtype, **{name: component(folder, name, method, "cuda:0")})
    for other in ("transformer", "text_encoder", "text_encoder_2"):
        if other != name:
            getattr(reference, other).to("cuda:0")
    assert torch.equal(result.cpu(), models.prompt_flux(reference).cpu())


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_passed_gguf_transformer(rig_devices, folder, tmp_path):
    import torch

    pytest.importorskip("gguf")
    if sentence := unmet("diffusers>=0.32"):
        pytest.skip(sentence)
    from tests.fixes import gguf_models

    model = gguf_models.transformer(tmp_path)
    encoders = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    reference = models.flux_pipeline(gguf_models.transformer(tmp_path).to("cuda:0"))
    expected = models.call_flux(reference, "cuda:0", model.dtype)
    models.flux_pipeline().save_pretrained(tmp_path / "pipeline")
    pipe = pipeline(
        tmp_path / "pipeline", device_map="balanced", max_memory=MEMORY, transformer=model, **encoders
    )
    assert_map_is_right(pipe)
    assert torch.equal(models.call_flux(pipe, "cuda:0", model.dtype).cpu(), expected.cpu())


@pytest.mark.parametrize("several", [False, True], ids=["one", "list"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_component_that_the_saved_pipeline_does_not_have(rig_devices, tmp_path, several):
    """A ControlNet is planned too, so that it counts for the room on its GPU."""
    import torch
    from diffusers import FluxControlNetModel, FluxControlNetPipeline

    pipe = models.flux_pipeline(text=True)
    last = pipe.vae.quant_conv or pipe.vae.encoder.conv_out
    half = len(last.bias) // 2
    with torch.no_grad():  # its encoder draws random numbers, of the device that it is on: no deviation
        last.weight[half:], last.bias[half:] = 0, -30
    pipe.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = models.flux_transformer().config
    accepted = inspect.signature(FluxControlNetModel).parameters
    controlnet = FluxControlNetModel(
        **{name: value for name, value in config.items() if name in accepted}
    ).eval()
    for parameter in controlnet.parameters():  # its last layers begin with zeros
        torch.nn.init.normal_(parameter, std=0.1)

    def load(**options):
        passed = [controlnet, controlnet] if several else controlnet
        pipe = FluxControlNetPipeline.from_pretrained(
            tmp_path, torch_dtype=torch.float32, controlnet=passed, **options
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def run(pipe):
        image = torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
        strength = (
            {"control_image": [image, image], "controlnet_conditioning_scale": [1.0, 1.0]}
            if several
            else {"control_image": image}
        )
        arguments = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "latent"}
        generator = torch.Generator("cpu").manual_seed(0)
        return pipe("w1 w2", max_sequence_length=16, generator=generator, **strength, **arguments).images

    expected = run(load())
    pipe = load(device_map="balanced", max_memory={0: 2_000_000, 1: 2_000_000})
    assert_map_is_right(pipe)
    assert torch.allclose(run(pipe).cpu(), expected, atol=1e-4)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_one_place_for_the_whole_pipeline(rig_devices, folder):
    """``device_map="cuda"``, which diffusers has accepted since 0.36 where there is a GPU."""
    from unittest import mock

    import torch
    from diffusers.pipelines import pipeline_utils

    if sentence := unmet("diffusers>=0.36"):
        pytest.skip(sentence)
    model = component(folder, "transformer", "plain")
    with mock.patch.object(pipeline_utils, "SUPPORTED_DEVICE_MAP", ["balanced", "cuda"]):
        pipe = pipeline(folder, device_map="cuda", transformer=model)
    result = models.prompt_flux(pipe)
    assert torch.equal(result.cpu(), models.prompt_flux(pipeline(folder).to("cuda:0")).cpu())


def test_what_is_offloaded_or_spread_is_left_alone(rig_devices, folder):
    from accelerate import cpu_offload

    model = component(folder, "text_encoder_2", "plain")
    cpu_offload(model, "cuda:1")
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    pipe = pipeline(folder, device_map="balanced", max_memory=MEMORY, text_encoder_2=model)
    assert hooks == [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    models.prompt_flux(pipe)


def test_the_map_can_be_reset(rig_devices, folder):
    """And the pipeline can be offloaded by other means then, the passed component too."""
    import torch

    model = component(folder, "transformer", "nf4")
    pipe = pipeline(folder, device_map="balanced", max_memory=MEMORY, transformer=model)
    expected = models.prompt_flux(pipe)
    pipe.reset_device_map()
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}
    pipe.enable_model_cpu_offload(device="cuda:0")
    assert torch.equal(models.prompt_flux(pipe).cpu(), expected.cpu())


def test_nothing_is_left_behind_by_a_load_that_fails(rig_devices, folder):
    from unittest import mock

    from diffusers import FluxPipeline

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    model = component(folder, "transformer", "plain")
    with mock.patch.object(FluxPipeline, "register_modules", fail), pytest.raises(KeyboardInterrupt):
        pipeline(folder, device_map="balanced", max_memory=MEMORY, transformer=model)
    assert not hasattr(model, "_hf_hook") and model.device.type == "cpu"
    assert_map_is_right(pipeline(folder, device_map="balanced", max_memory=MEMORY))
