"""diffusers-sharded-companions: a checkpoint whose files part a weight from its companions."""

from __future__ import annotations

import json

import pytest

from diffusers_quantfix.fixes.diffusers import sharded_companions
from tests.fixes import four_bit
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-sharded-companions"
SHOWS = r"does not contain `bitsandbytes__\*`|Missing quantization component `SCB`|absmax|quant_map"
SIZE = 4100  # bytes: the ends of such files fall everywhere

pytest.importorskip("diffusers")


def saved(tmp_path, bits: int, **options):
    """A Flux transformer, and the folder where it is saved in files of which some end within a layer."""
    whole = models.flux_transformer()
    with four_bit.skip_for_other_reasons():
        model = models.load_quantized(
            type(whole), models.saved(whole, tmp_path / "whole"), bits=bits, **options
        )
    folder = tmp_path / "saved"
    model.save_pretrained(folder, max_shard_size=SIZE)
    index = next(folder.glob("*.index.json"))
    places = json.loads(index.read_text())["weight_map"]
    last = ".absmax" if bits == 4 else ".SCB"
    parted = [
        key
        for key, file in places.items()
        if key.endswith(last) and places[key.replace(".SCB", ".weight").removesuffix(".absmax")] != file
    ]
    assert parted, "no file ends between a weight and its companions"
    return model, folder


def assert_same(model, folder, device) -> None:
    import torch

    again = type(model).from_pretrained(folder, torch_dtype=torch.float16)
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


def test_which_keys_are_apart(tmp_path):
    import torch
    from safetensors.torch import save_file

    contents = {
        "a": ("x.weight", "x.weight.absmax", "y.weight", "z.weight", "w.weight"),
        "b": ("x.weight.quant_state.bitsandbytes__nf4", "y.SCB", "y.weight_format", "z.bias", "other.absmax"),
    }
    files = [str(tmp_path / f"{name}.safetensors") for name in contents]
    for file, keys in zip(files, contents.values(), strict=True):
        save_file({key: torch.ones(1) for key in keys}, file)
    apart = sharded_companions.companions_apart(files)
    assert apart == {
        "x.weight": {"x.weight.quant_state.bitsandbytes__nf4": files[1]},
        "y.weight": {"y.SCB": files[1], "y.weight_format": files[1]},
    }
    first, second = ({key: torch.zeros(1) for key in keys} for keys in contents.values())
    assert set(sharded_companions.brought_together(first, apart)) == {*contents["a"], *contents["b"][:3]}
    assert set(sharded_companions.brought_together(second, apart)) == {"z.bias", "other.absmax"}


@pytest.mark.parametrize(
    "files", [None, [], ["one.safetensors"], [{}, {}], ["a.bin", "b.bin"], ["no", "where"]]
)
def test_what_is_left_alone(files):
    assert sharded_companions.companions_apart(files) == {}


def test_a_file_that_cannot_be_read_is_upstreams_error(gpu, tmp_path):
    import torch

    model, folder = saved(tmp_path, 4)
    sorted(folder.glob("*.safetensors"))[-1].write_bytes(b"no tensors")
    with pytest.raises(Exception) as error:  # which one is upstream's choice
        type(model).from_pretrained(folder, torch_dtype=torch.float16)
    assert "_with_a_look_ahead" not in [entry.name for entry in error.traceback[-2:]]
