"""diffusers-modular-guard: ``to("cuda")`` of a modular pipeline with components that cannot be moved."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import spelled
from tests.fixes.callers import spelling as spelling
from tests.fixes.test_diffusers_spread_guard import SPREAD
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.modular_pipelines", reason="modular pipelines came with diffusers 0.35")

FIX_ID = "diffusers-modular-guard"
NEEDS = "accelerate>=1.1.0"
CLEAR = "you have activated sequential model offloading"
SHOWS = "Cannot copy out of meta tensor"


def pipeline(**components):
    """A modular pipeline without blocks."""
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline
    from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec

    pipe = ModularPipeline.__new__(ModularPipeline)
    specs = {name: ComponentSpec(name=name, type_hint=type(part)) for name, part in components.items()}
    vars(pipe).update(_component_specs=specs, hf_device_map=None, **components)
    return pipe


def transformer(folder, bits: int = 4):
    whole = models.flux_transformer()
    return four_bit.load(type(whole), models.saved(whole, folder / "transformer"), bits=bits)


def encoder(folder, bits: int, device_map=None):
    whole = models.t5_encoder()
    return four_bit.load(
        type(whole), models.saved(whole, folder / "encoder"), bits=bits, device_map=device_map
    )


def places(pipe) -> list:
    return [weight.device for part in pipe.components.values() for weight in part.parameters()]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_a_plain_component_is_offloaded(gpu, tmp_path, bits):
    from accelerate import cpu_offload

    pipe = pipeline(
        quantized=transformer(tmp_path, bits),
        plain=models.flux_transformer(),
        text_encoder=models.clip_text(),
    )
    cpu_offload(pipe.text_encoder, spelled(gpu.devices[0]))
    before = places(pipe)
    for ask in (lambda: pipe.to("cuda"), lambda: pipe.to(device=gpu.devices[0])):
        with pytest.raises(ValueError, match=CLEAR):
            ask()
    assert places(pipe) == before
    pipe.to(torch.float32)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_a_component_in_4_bits_is_offloaded(gpu, tmp_path):
    from accelerate import cpu_offload

    pipe = pipeline(text_encoder=models.clip_text(), transformer=transformer(tmp_path))
    cpu_offload(pipe.transformer, spelled(gpu.devices[0]))
    with pytest.raises(ValueError, match=CLEAR):
        pipe.to("cuda")
    assert {str(device) for device in places(pipe)} == {"cpu", "meta"}


@pytest.mark.defect(FIX_ID, shows="DID NOT RAISE", needs=NEEDS)
def test_a_component_in_4_bits_is_spread(rig_devices, tmp_path):
    pipe = pipeline(transformer=models.flux_transformer(), text_encoder=encoder(tmp_path, 4, SPREAD))
    before = places(pipe)
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        with pytest.raises(ValueError, match=r"text_encoder .* is spread over several devices"):
            pipe.to(device)
    assert places(pipe) == before


def test_one_in_8_bits_stays_where_it_is(rig_devices, tmp_path):
    """It works after the move, as without the package."""
    pipe = pipeline(transformer=models.flux_transformer(), text_encoder=encoder(tmp_path, 8, SPREAD))
    before = [weight.device for weight in pipe.text_encoder.parameters()]
    pipe.to("cuda:0")
    assert [weight.device for weight in pipe.text_encoder.parameters()] == before
    assert {weight.device.type for weight in pipe.transformer.parameters()} == {"cuda"}
    with torch.no_grad():
        states = pipe.text_encoder(torch.tensor([[2, 5, 3]], device="cuda:0")).last_hidden_state
    assert torch.isfinite(states).all()


@pytest.mark.defect(FIX_ID, shows="DID NOT RAISE", needs=NEEDS)
def test_one_that_is_not_quantized_is_spread(rig_devices, tmp_path):
    from transformers import T5EncoderModel

    plain = T5EncoderModel.from_pretrained(
        models.saved(models.t5_encoder(), tmp_path / "t5"), device_map=SPREAD
    )
    pipe = pipeline(transformer=transformer(tmp_path), text_encoder=plain)
    before = places(pipe)
    with pytest.raises(ValueError, match=r"text_encoder .* is spread over several devices"):
        pipe.to("cuda")
    assert places(pipe) == before


def test_one_in_8_bits_that_is_offloaded_stays_where_it_is(rig_devices, tmp_path):
    """It works after the move, as without the package."""
    from accelerate import cpu_offload

    part = encoder(tmp_path, 8, None)
    cpu_offload(part, "cuda:0")
    pipe = pipeline(transformer=models.flux_transformer(), text_encoder=part)
    before = [weight.device for weight in part.parameters()]
    pipe.to("cuda:0")
    assert [weight.device for weight in part.parameters()] == before
    assert {weight.device.type for weight in pipe.transformer.parameters()} == {"cuda"}


def test_what_can_move_moves(gpu, tmp_path):
    here = gpu.devices[0]
    pipe = pipeline(text_encoder=models.clip_text(), transformer=transformer(tmp_path))
    pipe.to("cpu", silence_dtype_warnings=True)
    pipe.to(here)
    four_bit.assert_whole(pipe.transformer, here)
    assert {weight.device for weight in pipe.text_encoder.parameters()} == {torch.device(here)}
