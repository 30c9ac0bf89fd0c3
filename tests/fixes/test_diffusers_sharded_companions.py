"""diffusers-sharded-companions: a checkpoint whose files part a weight from its companions."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes.sharded import SHOWS, SIZE, save
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-sharded-companions"

pytest.importorskip("diffusers")


def saved(tmp_path, bits: int, **options):
    """A Flux transformer, and the folder where it is saved in files of which some end within a layer."""
    whole = models.flux_transformer()
    with four_bit.skip_for_other_reasons():
        model = models.load_quantized(
            type(whole), models.saved(whole, tmp_path / "whole"), bits=bits, **options
        )
    return model, save(model, tmp_path / "saved", bits)


def assert_same(model, folder, device, **options) -> None:
    import torch

    again = type(model).from_pretrained(folder, torch_dtype=torch.float16, **options)
    assert four_bit.differences(four_bit.state_of(model), four_bit.state_of(again)) == []
    outputs = [models.call_flux(models.flux_pipeline(one), device).cpu() for one in (model, again)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("double_quant", [False, True], ids=["nf4", "nf4-double"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_in_4_bits(gpu, tmp_path, double_quant):
    model, folder = saved(tmp_path, 4, bnb_4bit_use_double_quant=double_quant)
    assert_same(model, folder, gpu.devices[0])


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers<0.40", "bitsandbytes>=0.45"))
def test_a_model_in_8_bits(gpu, tmp_path):
    model, folder = saved(tmp_path, 8)
    assert_same(model, folder, gpu.devices[0])


def test_a_model_in_8_bits_where_diffusers_waits_for_the_scales(gpu, tmp_path):
    """From 0.40 on it keeps what is parted until its other half comes; both at once are no harm."""
    if reason := unmet("diffusers>=0.40"):
        pytest.skip(reason)
    model, folder = saved(tmp_path, 8)
    assert_same(model, folder, gpu.devices[0])


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="torch>=2.6")
def test_files_of_torch_save(gpu, tmp_path):
    model, _ = saved(tmp_path, 4)
    folder = save(model, tmp_path / "pickled", 4, safe_serialization=False)
    assert len(list(folder.glob("*.bin"))) > 1
    assert_same(model, folder, gpu.devices[0], use_safetensors=False)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_pipeline(gpu, tmp_path):
    import torch
    from diffusers import FluxPipeline

    model, _ = saved(tmp_path, 4)
    pipeline = models.flux_pipeline(model)
    pipeline.save_pretrained(tmp_path / "pipeline", max_shard_size=SIZE)
    names = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    others = dict.fromkeys((*names, "image_encoder", "feature_extractor"))
    accepted = {name: None for name in others if name in FluxPipeline.__init__.__annotations__}
    again = FluxPipeline.from_pretrained(tmp_path / "pipeline", torch_dtype=torch.float16, **accepted)
    again.set_progress_bar_config(disable=True)
    here = gpu.devices[0]
    assert torch.equal(models.call_flux(again, here).cpu(), models.call_flux(pipeline, here).cpu())


def test_files_that_are_loaded_at_once(gpu, tmp_path, monkeypatch):
    from diffusers.models import modeling_utils

    if not hasattr(modeling_utils, "_load_shard_files_with_threadpool"):
        pytest.skip("this diffusers loads one file after the other")
    monkeypatch.setattr(modeling_utils, "HF_ENABLE_PARALLEL_LOADING", True, raising=False)
    monkeypatch.setenv("HF_ENABLE_PARALLEL_LOADING", "yes")
    model, folder = saved(tmp_path, 4)
    assert_same(model, folder, gpu.devices[0])


def test_nothing_is_left_on_the_quantizer(gpu, tmp_path):
    import torch

    model, folder = saved(tmp_path, 4)
    again = type(model).from_pretrained(folder, torch_dtype=torch.float16)
    assert not hasattr(again.hf_quantizer, "_quantfix_apart")


def test_a_file_that_cannot_be_read_is_upstreams_error(gpu, tmp_path):
    import torch

    model, folder = saved(tmp_path, 4)
    sorted(folder.glob("*.safetensors"))[-1].write_bytes(b"no tensors")
    with pytest.raises(Exception) as error:  # which one is upstream's choice
        type(model).from_pretrained(folder, torch_dtype=torch.float16)
    assert "_with_a_look_ahead" not in [entry.name for entry in error.traceback[-2:]]
