"""diffusers-spread-guard: ``pipe.to("cuda")`` of a bitsandbytes component that is spread over two GPUs."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-spread-guard"
SHOWS = "DID NOT RAISE"
# Where upstream refuses by itself, it says the second.
REFUSAL = r"spread over several devices|sequential model offloading"
# From here on upstream's `to` moves what is in 8 bits.
MOVES_8BIT = ("diffusers>=0.37.0", "bitsandbytes>=0.48.0", "transformers>=5.0.0")
SPREAD = {
    "shared": 0,
    "encoder.embed_tokens": 0,
    "encoder.block.0": 0,
    "encoder.block.1": 1,
    "encoder.final_layer_norm": 1,
}


@pytest.fixture
def folder(tmp_path):
    models.t5_encoder().save_pretrained(tmp_path)
    return tmp_path


def pipeline(folder, bits: int, device_map):
    from transformers import T5EncoderModel

    encoder = four_bit.load(T5EncoderModel, folder, bits=bits, device_map=device_map)
    return models.flux_pipeline(text=True, vae=None, text_encoder_2=encoder)


def assert_refused(pipe, name: str) -> None:
    """In each spelling, and nothing moves."""
    import torch

    before = {
        part: [weight.device for weight in pipe.components[part].parameters()]
        for part in (name, "transformer")
    }
    for spelling in ("cuda", "cuda:0", "cuda:1", torch.device("cuda"), torch.device("cuda", 1)):
        with pytest.raises(ValueError, match=REFUSAL):
            pipe.to(spelling)
        with pytest.raises(ValueError, match=REFUSAL):
            pipe.to(device=spelling)
    for part, devices in before.items():
        assert [weight.device for weight in pipe.components[part].parameters()] == devices


def assert_runs(encoder) -> None:
    import torch

    with torch.no_grad():
        states = encoder(torch.tensor([[2, 5, 3]], device="cuda:0")).last_hidden_state
    assert torch.isfinite(states).all()


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="accelerate>=1.1.0")
def test_it_is_refused_before_anything_moves(rig_devices, folder):
    pipe = pipeline(folder, 4, SPREAD)
    assert_refused(pipe, "text_encoder_2")
    assert {parameter.device.type for parameter in pipe.transformer.parameters()} == {"cpu"}


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("accelerate>=1.1.0", *MOVES_8BIT))
def test_one_in_8_bits_is_refused(rig_devices, folder):
    if any(map(unmet, MOVES_8BIT)):
        pytest.skip("these releases leave it where it is")
    assert_refused(pipeline(folder, 8, SPREAD), "text_encoder_2")


def test_one_in_8_bits_that_stays_where_it_is(rig_devices, folder):
    """It works after the move, as without the package."""
    if not any(map(unmet, MOVES_8BIT)) or unmet("accelerate>=1.1.0") or unmet("diffusers>=0.32.0"):
        pytest.skip("these releases refuse it or move it")
    pipe = pipeline(folder, 8, SPREAD)
    before = [weight.device for weight in pipe.text_encoder_2.parameters()]
    pipe.to("cuda:0")
    assert [weight.device for weight in pipe.text_encoder_2.parameters()] == before
    assert {weight.device.type for weight in pipe.transformer.parameters()} == {"cuda"}
    assert_runs(pipe.text_encoder_2)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="accelerate>=1.1.0")
def test_one_that_is_not_quantized_beside_one_that_is(rig_devices, folder, tmp_path_factory):
    from diffusers import FluxTransformer2DModel
    from transformers import T5EncoderModel

    saved = models.saved(models.flux_transformer(), tmp_path_factory.mktemp("transformer"))
    with four_bit.skip_for_other_reasons():
        transformer = models.load_quantized(FluxTransformer2DModel, saved)
        encoder = T5EncoderModel.from_pretrained(folder, device_map=SPREAD)
    pipe = models.flux_pipeline(transformer, text=True, vae=None, text_encoder_2=encoder)
    assert_refused(pipe, "text_encoder_2")


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="accelerate>=1.1.0")
@pytest.mark.parametrize("places", [{"text_encoder_2": "cuda:0"}, "cuda:0"], ids=str)
def test_a_pipeline_with_a_map_of_one_device(rig_devices, folder, places):
    """As ``from_pretrained(device_map="cuda")`` leaves it."""
    pipe = pipeline(folder, 4, SPREAD)
    if isinstance(places, str) and not hasattr(pipe, "_is_pipeline_device_mapped"):
        pytest.skip("these releases have no such maps")
    pipe.hf_device_map = places
    assert_refused(pipe, "text_encoder_2")


def test_a_map_that_was_undone(rig_devices, folder):
    """Model offload's hook does not send parts to other devices."""
    from accelerate import cpu_offload_with_hook
    from accelerate.hooks import remove_hook_from_submodules

    if unmet("accelerate>=1.1.0"):
        pytest.skip("it cannot be loaded so")
    pipe = pipeline(folder, 4, SPREAD)
    remove_hook_from_submodules(pipe.text_encoder_2)
    assert_moves(pipe)
    cpu_offload_with_hook(pipe.text_encoder_2, 0)
    assert_moves(pipe)


def test_a_part_without_weights_elsewhere(rig_devices, folder):
    if unmet("accelerate>=1.1.0") or unmet("diffusers>=0.32.0"):
        pytest.skip("these releases refuse it")
    pipe = pipeline(folder, 4, {**dict.fromkeys(SPREAD, 0), "encoder.dropout": 1})
    assert_moves(pipe)
    assert_runs(pipe.text_encoder_2)


def assert_moves(pipe) -> None:
    try:
        pipe.to("cuda:0")
    except ValueError as error:
        if "`.to` is not supported for `4-bit`" not in str(error):
            raise
        pytest.skip("this transformers moves no 4-bit model")
    four_bit.assert_whole(pipe.text_encoder_2, "cuda:0")


def test_one_device_in_several_spellings(rig_devices, folder):
    pipe = pipeline(folder, 4, {**dict.fromkeys(SPREAD, 0), "encoder.final_layer_norm": "cuda:0"})
    assert_moves(pipe)


@pytest.mark.parametrize("device_map", [None, {"": 0}, "cuda:0"], ids=str)
def test_on_one_device_it_moves_as_before(rig_devices, folder, device_map):
    pipe = pipeline(folder, 4, device_map)
    assert_moves(pipe)
    assert_runs(pipe.text_encoder_2)


def test_a_dtype_alone_is_no_move(rig_devices, folder):
    import torch

    pipeline(folder, 4, SPREAD).to(torch.float16)
