"""diffusers-spread-guard: ``pipe.to("cuda")`` of a bitsandbytes component that is spread over two GPUs."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.rig import models

FIX_ID = "diffusers-spread-guard"
SHOWS = "DID NOT RAISE"
# Where upstream refuses by itself, it says the second.
REFUSAL = r"spread over several devices|sequential model offloading"
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


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="accelerate>=1.1.0")
def test_it_is_refused_before_anything_moves(rig_devices, folder, bits):
    import torch

    pipe = pipeline(folder, bits, SPREAD)
    before = [parameter.device for parameter in pipe.text_encoder_2.parameters()]
    for spelling in ("cuda", "cuda:0", "cuda:1", torch.device("cuda"), torch.device("cuda", 1)):
        with pytest.raises(ValueError, match=REFUSAL):
            pipe.to(spelling)
        with pytest.raises(ValueError, match=REFUSAL):
            pipe.to(device=spelling)
    assert [parameter.device for parameter in pipe.text_encoder_2.parameters()] == before
    assert {parameter.device.type for parameter in pipe.transformer.parameters()} == {"cpu"}


@pytest.mark.parametrize("device_map", [None, {"": 0}, "cuda:0"], ids=str)
def test_on_one_device_it_moves_as_before(rig_devices, folder, device_map):
    import torch

    pipe = pipeline(folder, 4, device_map)
    try:
        pipe.to("cuda:0")
    except ValueError as error:
        if "`.to` is not supported for `4-bit`" not in str(error):
            raise
        pytest.skip("this transformers moves no 4-bit model")
    four_bit.assert_whole(pipe.text_encoder_2, "cuda:0")
    with torch.no_grad():
        states = pipe.text_encoder_2(torch.tensor([[2, 5, 3]], device="cuda:0")).last_hidden_state
    assert torch.isfinite(states).all()


def test_a_dtype_alone_is_no_move(rig_devices, folder):
    import torch

    pipeline(folder, 4, SPREAD).to(torch.float16)
