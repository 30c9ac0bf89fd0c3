"""transformers-sharded-companions: a text encoder whose files part a weight from its companions."""

from __future__ import annotations

import json
import re

import pytest

from diffusers_quantfix.fixes.transformers import sharded_companions
from diffusers_quantfix.loading import shards
from tests.fixes import eight_bit, four_bit
from tests.fixes.sharded import SHOWS, SIZE, save
from tests.gate import unmet
from tests.rig import models

FIX_ID = "transformers-sharded-companions"

pytest.importorskip("transformers")

MODELS = {"t5": models.t5_encoder, "clip": models.clip_text}


def llama(head: bool, seed: int = 0):
    """A language model as the newer pipelines have it, with its head or without."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return (LlamaForCausalLM if head else LlamaModel)(config).eval()


def bert():
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(
        BertConfig(
            vocab_size=models.VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    ).eval()


def quantized(whole, tmp_path, bits: int = 4, **options):
    """``whole`` as ``from_pretrained`` quantizes it."""
    with four_bit.skip_for_other_reasons():
        return models.load_quantized(
            type(whole), models.saved(whole, tmp_path / "whole"), bits=bits, **options
        )


def saved(whole, tmp_path, bits: int = 4, **options):
    """The quantized model, and the folder where it is saved in files of which some end within a layer."""
    model = quantized(whole, tmp_path, bits, **options)
    return model, save(model, tmp_path / "saved", bits)


def load(model_class, folder, **options):
    import torch

    return model_class.from_pretrained(folder, torch_dtype=torch.float16, **options)


def output(model):
    import torch

    with torch.no_grad():
        return model(torch.tensor([[1, 5, 7, 3]], device=model.device))[0].cpu()


def assert_same(model, again) -> None:
    """``again`` has the weights and the output of ``model``, bit by bit."""
    import torch

    assert four_bit.differences(four_bit.state_of(model), four_bit.state_of(again)) == []
    assert torch.equal(output(model), output(again))


@pytest.mark.parametrize("double_quant", [False, True], ids=["nf4", "nf4-double"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_in_4_bits(gpu, tmp_path, name, double_quant):
    model, folder = saved(MODELS[name](), tmp_path, bnb_4bit_use_double_quant=double_quant)
    again = load(type(model), folder)
    four_bit.assert_whole(again, gpu.devices[0])
    assert_same(model, again)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("bitsandbytes>=0.45", "bitsandbytes!=0.48.0"))
def test_a_model_in_8_bits(gpu, tmp_path, name):
    model, folder = saved(MODELS[name](), tmp_path, 8)
    again = load(type(model), folder)
    eight_bit.assert_whole(again, gpu.devices[0])
    assert_same(model, again)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="torch>=2.6")
def test_files_of_torch_save(gpu, tmp_path):
    if reason := unmet("transformers<5"):
        pytest.skip(f"it writes safetensors only: {reason}")
    model = quantized(models.t5_encoder(), tmp_path)
    folder = save(model, tmp_path / "saved", 4, safe_serialization=False)
    assert len(list(folder.glob("*.bin"))) > 1
    assert_same(model, load(type(model), folder))


def test_files_of_torch_save_before_torch_2_6(gpu, tmp_path, monkeypatch):
    """Most releases refuse them, as the files can run code: nothing else opens them."""
    import torch

    if reason := unmet("transformers<4.57"):
        pytest.skip(reason)
    model = quantized(models.t5_encoder(), tmp_path)
    folder = save(model, tmp_path / "saved", 4, safe_serialization=False)
    read = []
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.5.1"))
    monkeypatch.setattr(shards, "_tensors", lambda file, wanted: read.append(file) or {})
    with pytest.raises(Exception, match="torch.load|" + SHOWS):
        load(type(model), folder)
    assert not read


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_an_encoder_out_of_the_whole_model(gpu, tmp_path):
    """The decoder's weights are in the files too, and nobody asks for them."""
    if unmet("transformers<4.57") and unmet("transformers>=5"):
        pytest.skip("transformers 4.57 cannot load it from one file either: it looks for the decoder")
    import torch
    from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=128, num_layers=1, num_heads=2)
    model, folder = saved(T5ForConditionalGeneration(config).eval(), tmp_path)
    again = load(T5EncoderModel, folder)
    expected = {key: value for key, value in four_bit.state_of(model).items() if key.startswith("encoder.")}
    found = {key: value for key, value in four_bit.state_of(again).items() if key.startswith("encoder.")}
    assert four_bit.differences(expected, found) == []
    inputs = torch.tensor([[1, 5, 7, 3]], device=model.device)
    with torch.no_grad():
        assert torch.equal(model.encoder(inputs)[0].cpu(), output(again))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_that_is_loaded_with_a_head(gpu, tmp_path):
    """Its keys are loaded under other names; the head is tied to the embeddings."""
    whole = llama(head=False)
    model, folder = saved(whole, tmp_path)
    again = load(type(llama(head=True)), folder)
    assert_same(model, again.model)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_that_is_loaded_without_its_head(gpu, tmp_path):
    if reason := unmet("transformers>=4.50"):
        pytest.skip(f"before 4.50 that fails with one file too: {reason}")
    model, folder = saved(llama(head=True), tmp_path)
    again = load(type(llama(head=False)), folder)
    assert_same(model.model, again)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_keys_with_names_of_the_past(gpu, tmp_path):
    from safetensors.torch import load_file, save_file

    def old(key: str) -> str:
        return key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    model, folder = saved(bert(), tmp_path)
    for file in folder.glob("*.safetensors"):
        renamed = {old(key): tensor for key, tensor in load_file(file).items()}
        save_file(renamed, file, metadata={"format": "pt"})
    index = next(folder.glob("*.index.json"))
    said = json.loads(index.read_text())
    said["weight_map"] = {old(key): file for key, file in said["weight_map"].items()}
    index.write_text(json.dumps(said))
    assert_same(model, load(type(model), folder))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_text_encoder_of_a_pipeline(gpu, tmp_path):
    pytest.importorskip("diffusers")
    from diffusers import FluxPipeline

    model = quantized(models.t5_encoder(), tmp_path)
    models.flux_pipeline(text_encoder_2=model).save_pretrained(tmp_path / "pipeline", max_shard_size=SIZE)
    names = ("vae", "text_encoder", "tokenizer", "tokenizer_2", "image_encoder", "feature_extractor")
    absent = {name: None for name in names if name in FluxPipeline.__init__.__annotations__}
    again = FluxPipeline.from_pretrained(tmp_path / "pipeline", **absent)
    assert_same(model, again.text_encoder_2)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_that_is_spread_over_devices(gpu, tmp_path):
    here, there = gpu.devices[0], gpu.devices[-1]
    model, folder = saved(llama(head=False), tmp_path)
    places = {"embed_tokens": here, "layers.0": here, "layers.1": there, "norm": there, "rotary_emb": here}
    again = load(type(model), folder, device_map=places)
    four_bit.assert_whole(again.layers[0], here)
    four_bit.assert_whole(again.layers[1], there)
    assert_same(model, again)


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_offloaded_fares_as_with_one_file(gpu, tmp_path, bits, where):
    """How that is differs: refused while it is loaded, or loaded as the bytes that are there."""
    if bits == 8 and (reason := unmet("bitsandbytes>=0.45")):
        pytest.skip(reason)
    model, folder = saved(llama(head=False), tmp_path, bits, llm_int8_enable_fp32_cpu_offload=True)
    model.save_pretrained(tmp_path / "one")
    places = {"embed_tokens": 0, "layers.0": 0, "layers.1": where, "norm": 0, "rotary_emb": 0}

    def fares(source) -> list | str:
        try:
            again = load(type(model), source, device_map=dict(places), offload_folder=tmp_path / "offload")
        except Exception as error:
            return f"{type(error).__name__}: {re.sub(r'[0-9]+', '', str(error))}"
        return [(name, type(one), one.device, one.dtype) for name, one in again.named_parameters()]

    assert fares(folder) == fares(tmp_path / "one")


@pytest.mark.parametrize(
    "options", [{"offload_state_dict": True}, {"ignore_mismatched_sizes": True}], ids=str
)
def test_what_else_one_may_ask_for(gpu, tmp_path, options):
    model, folder = saved(models.t5_encoder(), tmp_path)
    assert_same(model, load(type(model), folder, **options))


def test_files_that_are_loaded_at_once(gpu, tmp_path, monkeypatch):
    from transformers import modeling_utils

    if not hasattr(modeling_utils, "load_shard_files_with_threadpool"):
        pytest.skip("this transformers loads one file after the other, or has its own way with threads")
    used = []
    original = modeling_utils.load_shard_files_with_threadpool
    monkeypatch.setattr(
        modeling_utils, "load_shard_files_with_threadpool", lambda args: used.append(1) or original(args)
    )
    monkeypatch.setenv("HF_ENABLE_PARALLEL_LOADING", "true")
    model, folder = saved(models.t5_encoder(), tmp_path)
    assert_same(model, load(type(model), folder))
    assert used


def read_by(call, monkeypatch) -> set[type]:
    """The types of the paths that ``call`` reads."""
    from transformers import modeling_utils

    found = set()
    original = modeling_utils.load_state_dict

    def load_state_dict(checkpoint_file, *args, **kwargs):
        found.add(type(checkpoint_file))
        return original(checkpoint_file, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(modeling_utils, "load_state_dict", load_state_dict)
        call()
    return found


def test_what_is_left_alone(gpu, tmp_path, monkeypatch):
    """Files that end with a layer, a model that is not quantized, one that is quantized as it is loaded."""
    if reason := unmet("transformers<4.57"):
        pytest.skip(reason)
    model, folder = saved(models.t5_encoder(), tmp_path)
    assert str not in read_by(lambda: load(type(model), folder), monkeypatch)

    models.t5_encoder().save_pretrained(tmp_path / "plain", max_shard_size=SIZE)
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 1
    assert read_by(lambda: load(type(model), tmp_path / "plain"), monkeypatch) == {str}
    assert read_by(lambda: models.load_quantized(type(model), tmp_path / "plain"), monkeypatch) == {str}
    model.save_pretrained(tmp_path / "one")
    assert read_by(lambda: load(type(model), tmp_path / "one"), monkeypatch) == {str}


def test_what_is_read_for_its_shapes_stays_on_meta(gpu, tmp_path):
    from safetensors.torch import load_file
    from transformers import modeling_utils

    if reason := unmet("transformers>=4.50") or unmet("transformers<4.57"):
        pytest.skip(reason)
    _, folder = saved(models.t5_encoder(), tmp_path)
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    apart = shards.companions_apart(files)
    for file in files:
        path = sharded_companions._with(file, apart)
        found = modeling_utils.load_state_dict(path, map_location="meta")
        assert found.keys() == load_file(file).keys()
        assert all(tensor.is_meta for tensor in found.values())


def test_a_file_that_cannot_be_read_is_upstreams_error(gpu, tmp_path):
    model, folder = saved(models.t5_encoder(), tmp_path)
    sorted(folder.glob("*.safetensors"))[-1].write_bytes(b"no tensors")
    with pytest.raises(Exception) as error:  # which one is upstream's choice
        load(type(model), folder)
    names = [entry.name for entry in error.traceback[-2:]]
    assert not {"_with_a_look_ahead", "look_ahead", "brought_together"} & set(names)
