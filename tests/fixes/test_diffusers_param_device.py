"""diffusers-param-device: a quantized model is loaded onto the current CUDA device, whatever was asked for."""

from __future__ import annotations

import contextlib

import pytest

from diffusers_quantfix.weights.companions import companions
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-param-device"
SHOWS = r"NotImplementedError: Currently, .*`device_map`"

before_0_33 = pytest.mark.skipif(
    bool(unmet("diffusers<0.33")), reason="looks into the patch, which is not there"
)
bits_4_and_8 = pytest.mark.parametrize("bits", [4, 8])


def requests(device) -> list:
    """The same request in all its forms."""
    return [{"": str(device)}, {"": device}, {"": device.index}, str(device), device.index, device]


@bits_4_and_8
@pytest.mark.parametrize(
    "form", range(6), ids=["map-name", "map-device", "map-index", "name", "index", "device"]
)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_request_for_one_device_is_honoured(gpu, checkpoint, side, bits, form):
    first, second = pair(gpu)
    with untouched(gpu, first):
        model = load(checkpoint, side, bits, requests(second)[form])
    assert_all_on(second, model)


@bits_4_and_8
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_checkpoint_that_is_quantized_already(gpu, checkpoint, tmp_path, side, bits):
    first, second = pair(gpu)
    saved = models.saved(load(checkpoint, side, bits), tmp_path / "quantized")
    with untouched(gpu, first):
        model = type(models.flux_transformer()).from_pretrained(saved, device_map={"": second.index})
    assert_all_on(second, model)


@before_0_33
@bits_4_and_8
@pytest.mark.parametrize("current", [0, 1])
def test_without_a_request_it_is_the_current_device(gpu, checkpoint, bits, current):
    import torch

    mine, other = pair(gpu)[:: 1 if current == 0 else -1]
    with untouched(gpu, other), torch.cuda.device(mine):
        model = load(checkpoint, "patched", bits)
    assert_all_on(mine, model)


@before_0_33
@bits_4_and_8
def test_model_runs_where_it_was_asked_for(gpu, checkpoint, bits):
    outputs = [
        models.call_flux(models.flux_pipeline(load(checkpoint, "patched", bits, device)), device).cpu()
        for device in pair(gpu)
    ]
    assert outputs[0].isfinite().all()
    assert outputs[1].equal(outputs[0])


@before_0_33
@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (
            "cuda:7",
            ValueError,
            r"asks for cuda:7, and this machine has cuda:0, .*: pass an existing device",
        ),
        ({"": 7}, ValueError, r"asks for cuda:7, .*: pass an existing device"),
        (
            "auto",
            NotImplementedError,
            r"one device only, and device_map='auto' .*: pass one device such as 'cuda:0'",
        ),
        (
            {"x_embedder": 0, "": 1},
            NotImplementedError,
            r"a plan over several: pass one device such as 'cuda:0'",
        ),
        ({"": "disk"}, NotImplementedError, r"a plan over several: pass one device such as 'cuda:0'"),
        ({"": "somewhere"}, ValueError, r"names no device: pass one such as 'cuda:0'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_anything_is_allocated(
    gpu, checkpoint, request_, error, text
):
    with untouched(gpu, *gpu.devices), pytest.raises(error, match=text):
        load(checkpoint, "patched", 4, request_)


@before_0_33
@bits_4_and_8
def test_request_for_the_cpu(gpu, checkpoint, bits):
    with untouched(gpu, *gpu.devices):
        if unmet("bitsandbytes>=0.46"):
            with pytest.raises(ValueError, match=r"has no CPU support: pass an accelerator such as 'cuda:0'"):
                load(checkpoint, "patched", bits, "cpu")
        else:
            assert_all_on("cpu", load(checkpoint, "patched", bits, "cpu"))


@before_0_33
def test_4bit_checkpoint_is_copied_to_the_cpu_by_every_bitsandbytes(gpu, checkpoint, tmp_path):
    saved = models.saved(load(checkpoint, "patched", 4), tmp_path / "quantized")
    with untouched(gpu, *gpu.devices):
        model = type(models.flux_transformer()).from_pretrained(saved, device_map="cpu")
    assert_all_on("cpu", model)
    assert_all_on(gpu.devices[0], model.to(gpu.devices[0]))


@before_0_33
def test_without_cuda_it_is_loaded_where_the_machine_can(checkpoint, monkeypatch):
    """The refusal of a machine without a GPU is another defect (diffusers-cpu-only): it is put aside here."""
    import torch
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer

    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    if sentence := unmet("bitsandbytes>=0.46"):
        pytest.skip(sentence)
    monkeypatch.setattr(BnB4BitDiffusersQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
    for request in (None, "cpu", {"": "cpu"}):
        assert_all_on("cpu", load(checkpoint, "patched", 4, request))
    with pytest.raises(
        ValueError, match=r"asks for cuda:1, and this machine has the CPU only: pass a device"
    ):
        load(checkpoint, "patched", 4, 1)


@before_0_33
def test_a_request_is_forgotten_after_its_load(gpu, checkpoint):
    """It lives in a local variable of one call: neither a success nor an error leaves anything behind."""
    first, second = pair(gpu)
    assert_all_on(second, load(checkpoint, "patched", 4, second))
    with pytest.raises(ValueError, match="pass an existing device"):
        load(checkpoint, "patched", 4, "cuda:7")
    with pytest.raises(ValueError, match="low_cpu_mem_usage"):
        type(models.flux_transformer()).from_pretrained(
            checkpoint,
            device_map={"": second},
            low_cpu_mem_usage=False,
            quantization_config=models.bnb_config("diffusers"),
        )
    assert_all_on(first, load(checkpoint, "patched", 4))


@before_0_33
def test_plain_models_and_pipelines_load_as_before(gpu, checkpoint, tmp_path):
    from diffusers import DDPMPipeline, DDPMScheduler

    import diffusers_quantfix

    models.saved(DDPMPipeline(image_unet(), DDPMScheduler()), tmp_path / "pipeline")
    pair(gpu)

    def placed() -> dict:
        gpu.reset()  # "balanced" goes by the free memory
        pipe = DDPMPipeline.from_pretrained(tmp_path / "pipeline", device_map="balanced")
        mapped = type(models.flux_transformer()).from_pretrained(checkpoint, device_map={"": 1})
        plain = type(models.flux_transformer()).from_pretrained(checkpoint)
        return {
            "pipeline": (pipe.hf_device_map, pipe.unet.device, repr(pipe.unet._hf_hook)),
            "mapped": (mapped.device, repr(mapped._hf_hook)),
            "plain": (plain.device, hasattr(plain, "_hf_hook")),
        }

    with_us = placed()
    diffusers_quantfix.revert(FIX_ID)
    try:
        assert placed() == with_us
    finally:
        diffusers_quantfix.apply(FIX_ID)
    assert with_us["pipeline"][1].type == "cuda"
    assert with_us["mapped"][0] == gpu.devices[1]


@before_0_33
def test_revert_restores_the_code_and_the_lines_stay_those_of_upstream(gpu, checkpoint):
    from diffusers import ModelMixin

    import diffusers_quantfix
    from diffusers_quantfix.engine.probe import function_of

    function = function_of(vars(ModelMixin)["from_pretrained"])
    ours = function.__code__
    diffusers_quantfix.revert(FIX_ID)
    try:
        upstream = function.__code__
        assert "_quantfix_device" not in upstream.co_varnames
        with pytest.raises(NotImplementedError, match="device_map"):
            load(checkpoint, "patched", 4, "cuda:0")
    finally:
        diffusers_quantfix.apply(FIX_ID)
    assert function.__code__ == ours
    assert (ours.co_filename, ours.co_firstlineno) == (upstream.co_filename, upstream.co_firstlineno)
    assert max(line for *_, line in ours.co_lines() if line) == max(
        line for *_, line in upstream.co_lines() if line
    )


@pytest.fixture
def checkpoint(tmp_path):
    """The folder of a saved FluxTransformer2DModel."""
    return models.saved(models.flux_transformer(), tmp_path / "transformer")


def image_unet():
    """A UNet2DModel with two levels."""
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def load(folder, side, bits, device_map=None):
    """The FluxTransformer2DModel in 4 or 8 bits; skips on the bare side where none loads in 8 bits."""
    from diffusers import FluxTransformer2DModel

    try:
        return models.load_quantized(FluxTransformer2DModel, folder, bits, device_map)
    except ValueError as error:
        if side == "bare" and "`.to` is not supported for `8-bit`" in str(error):
            pytest.skip("no 8-bit model of diffusers loads here, which is another defect")
        raise


@contextlib.contextmanager
def untouched(gpu, *devices):
    """Not one byte is allocated on these devices inside the block, not even for a moment."""
    for device in devices:
        gpu.allocated(
            device
        )  # collects what earlier tests left, so that it cannot go and make room inside the block
    gpu.reset()
    before = [gpu.peak(device) for device in devices]
    yield
    for device, held in zip(devices, before, strict=True):
        more = gpu.peak(device) - held
        assert more == 0, f"{more} bytes were held on {device} for a moment"


def pair(gpu):
    """Two CUDA devices."""
    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    return gpu.devices[:2]


def assert_all_on(device, model) -> None:
    """Every tensor of a model is on ``device``: parameters, buffers, quant states, scales."""
    import torch

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.device == torch.device(device), f"{name} is on {tensor.device}, not on {device}"
    for module in model.modules():
        for companion in companions(module):
            found = companion.tensor.device
            assert found == torch.device(device), f"{companion} is on {found}, not on {device}"
