"""diffusers-single-file-device: from_single_file loads a quantized model onto the CPU, whatever device_map says."""

from __future__ import annotations

import pytest

from tests.fixes.test_diffusers_param_device import assert_all_on, pair, requests, untouched
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-single-file-device"
SHOWS = (
    r"AssertionError: .* is on cpu, not on cuda:\d"
    r"|AttributeError: '(int|torch.device)' object has no attribute 'items'"
    r"|ValueError: .* does not support `device_map='cuda:1'`"
)
NEEDS = "diffusers>=0.32"  # from_single_file has no quantization_config before

needs_0_32 = pytest.mark.skipif(bool(unmet(NEEDS)), reason="looks into the patch, which is not there")
bits_4_and_8 = pytest.mark.parametrize("bits", [4, 8])


@bits_4_and_8
@pytest.mark.parametrize(
    "form", range(6), ids=["map-name", "map-device", "map-index", "name", "index", "device"]
)
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_request_for_one_device_is_honoured(gpu, single_file, bits, form):
    first, second = pair(gpu)
    folder = single_file(bits)
    with untouched(gpu, first):
        model = load(folder, bits, device_map=requests(second)[form])
    assert_all_on(second, model)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_device_zero_is_no_missing_device(gpu, single_file):
    assert_all_on(gpu.devices[0], load(single_file(4), 4, device=0))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers>=0.32", "diffusers<0.33"))
def test_without_a_request_it_is_the_current_device(gpu, single_file, bits):
    import torch

    first, second = pair(gpu)
    folder = single_file(bits)
    with untouched(gpu, first), torch.cuda.device(second):
        model = load(folder, bits)
    assert_all_on(second, model)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=(NEEDS, "bitsandbytes<0.46"))
def test_8_bits_do_not_end_on_a_cpu_that_they_cannot_leave(gpu, single_file):
    assert_all_on(gpu.devices[0], load(single_file(8), 8))


@needs_0_32
def test_unquantized_and_4bit_models_stay_where_upstream_puts_them(gpu, single_file):
    folder = single_file(4)
    assert_all_on("cpu", load(folder, 4, device="cpu"))
    if not unmet("diffusers>=0.33"):
        assert_all_on("cpu", load(folder, 4))
    plain = models.saved(video_transformer(), folder.parent / "plain")
    assert_all_on("cpu", load(plain, None))
    assert_all_on(gpu.devices[0], load(plain, None, device=gpu.devices[0]))


@needs_0_32
def test_what_cannot_be_honoured_is_refused_before_anything_is_allocated(gpu, single_file):
    folder = single_file(4)
    with untouched(gpu, *gpu.devices):
        with pytest.raises(ValueError, match=r"asks for cuda:7, .*: pass an existing device"):
            load(folder, 4, device_map="cuda:7")
        with pytest.raises(ValueError, match=r"ask for different devices: pass one of the two"):
            load(folder, 4, device_map="cuda:0", device="cpu")
        if not unmet("diffusers<0.33"):
            with pytest.raises(NotImplementedError, match=r"a plan over several: pass one device such as"):
                load(folder, 4, device_map="auto")


@needs_0_32
def test_revert_and_apply(gpu, single_file):
    from diffusers.loaders import FromOriginalModelMixin

    import diffusers_quantfix

    folder = single_file(4)
    diffusers_quantfix.revert(FIX_ID, "diffusers-param-device")
    try:
        assert not hasattr(vars(FromOriginalModelMixin)["from_single_file"], "_self_wrapper")
        assert_all_on("cpu", load(folder, 4, device=0))
    finally:
        diffusers_quantfix.apply(FIX_ID, "diffusers-param-device")
    assert_all_on(gpu.devices[0], load(folder, 4, device=0))


def video_transformer():
    """An LTXVideoTransformer3DModel with one block: its single files have the keys of diffusers in every release."""
    import torch
    from diffusers import LTXVideoTransformer3DModel

    torch.manual_seed(0)
    return LTXVideoTransformer3DModel(
        in_channels=64,
        out_channels=64,
        num_attention_heads=2,
        attention_head_dim=32,
        cross_attention_dim=64,
        num_layers=1,
        caption_channels=64,
    )


@pytest.fixture
def single_file(gpu, tmp_path, side):
    """``single_file(bits)`` -> the folder of a config and of a file quantized in 4 or 8 bits."""

    def make(bits):
        plain = models.saved(video_transformer(), tmp_path / "unquantized")
        try:
            model = models.load_quantized(type(video_transformer()), plain, bits)
        except ValueError as error:
            if side == "bare" and "`.to` is not supported for `8-bit`" in str(error):
                pytest.skip("no 8-bit model of diffusers loads here, which is another defect")
            raise
        return models.saved(model, tmp_path / "quantized")

    return make


def load(folder, bits, **placement):
    """The model from its single file."""
    import torch
    from diffusers import LTXVideoTransformer3DModel

    quantization = {} if bits is None else {"quantization_config": models.bnb_config("diffusers", bits)}
    return LTXVideoTransformer3DModel.from_single_file(
        str(folder / "diffusion_pytorch_model.safetensors"),
        config=str(folder),
        torch_dtype=torch.float16,
        **quantization,
        **placement,
    )
