"""transformers-quantized-resave: a text encoder from a quantized checkpoint is saved again."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes import torchao_models as ao
from tests.gate import unmet
from tests.rig import models

FIX_ID = "transformers-quantized-resave"
SHOWS = r"\ANotImplementedError: $|could not revert some weight conversions because of offlading"

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def qwen_vl(seed: int = 0):
    """A model whose keys are renamed between file and model; that is to be reversed all the same."""
    transformers = pytest.importorskip("transformers")
    if sentence := unmet("transformers>=4.52"):
        pytest.skip(f"Qwen2.5-VL, with a configuration of its text model, came then; {sentence}")
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    text = {
        "vocab_size": models.VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": {**rope, "type": "mrope"},
        "rope_parameters": rope,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


MODELS = {"clip": models.clip_text, "t5": models.t5_encoder, "qwen-vl": qwen_vl}


def checkpoint(tmp_path, make, bits: int = 4, **options):
    """The class of a model, and the folder into which it was saved when it was quantized."""
    whole = make()
    model = four_bit.load(type(whole), models.saved(whole, tmp_path / "plain"), bits=bits, **options)
    return type(whole), models.saved(model, tmp_path / "first")


def load(model_class, folder, **options):
    with four_bit.skip_for_other_reasons():
        return model_class.from_pretrained(folder, torch_dtype=torch.float16, **options)


def tensors_in(folder) -> dict:
    from safetensors.torch import load_file

    found = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def assert_same_files(folder, other) -> None:
    assert four_bit.differences(tensors_in(folder), tensors_in(other)) == []


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model(gpu, tmp_path, name, bits):
    model_class, first = checkpoint(tmp_path, MODELS[name], bits)
    model = load(model_class, first)
    conversions = getattr(model, "_weight_conversions", None)
    assert_same_files(first, models.saved(model, tmp_path / "second"))
    assert getattr(model, "_weight_conversions", None) is conversions, "the model was changed"
    assert_same_files(first, models.saved(load(model_class, tmp_path / "second"), tmp_path / "third"))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_several_files(gpu, tmp_path, bits):
    model_class, first = checkpoint(tmp_path, models.t5_encoder, bits)
    load(model_class, first).save_pretrained(tmp_path / "second", max_shard_size="20KB")
    assert len(list((tmp_path / "second").glob("*.safetensors"))) > 1
    assert_same_files(first, tmp_path / "second")


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_double_quantization(gpu, tmp_path):
    model_class, first = checkpoint(tmp_path, models.clip_text, bnb_4bit_use_double_quant=True)
    assert_same_files(first, models.saved(load(model_class, first), tmp_path / "second"))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="transformers>=5")
def test_modules_on_the_cpu(gpu, tmp_path):
    """Such a model is reversed file by file."""
    model_class, first = checkpoint(
        tmp_path,
        models.t5_encoder,
        llm_int8_enable_fp32_cpu_offload=True,
        llm_int8_skip_modules=["encoder.block.1"],
    )
    places = {"shared": 0, "encoder.block.0": 0, "encoder.block.1": "cpu", "encoder.final_layer_norm": 0}
    model = load(model_class, first, device_map={**places, "encoder.embed_tokens": 0})
    assert "cpu" in model.hf_device_map.values()
    assert_same_files(first, models.saved(model, tmp_path / "second"))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="transformers>=5")
def test_after_ctrl_c_in_saving(gpu, tmp_path, monkeypatch):
    from transformers import modeling_utils

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    model_class, first = checkpoint(tmp_path, models.clip_text)
    model = load(model_class, first)
    conversions = model._weight_conversions
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(modeling_utils, "safe_save_file", interrupted)
        model.save_pretrained(tmp_path / "second")
    assert model._weight_conversions is conversions
    assert_same_files(first, models.saved(model, tmp_path / "third"))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("torchao>=0.15", "transformers>=5"))
def test_torchao(tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import CLIPTextModel, TorchAoConfig

    plain = models.saved(models.clip_text(), tmp_path / "plain")
    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = CLIPTextModel.from_pretrained(plain, quantization_config=config)
    with ao.skipped_where_not_saved():
        first = models.saved(model, tmp_path / "first")
    assert_same_files(first, models.saved(CLIPTextModel.from_pretrained(first), tmp_path / "second"))


def test_conversions_of_others_are_reversed_or_refused():
    """What has no reverse and is no quantizer's stays upstream's error; what has one is reversed."""
    loading = pytest.importorskip("transformers.core_model_loading")
    from types import SimpleNamespace

    class NoReverse(loading.ConversionOps):
        def convert(self, input_dict, **_):
            return input_dict

    def model(operation):
        conversion = loading.WeightConverter(["a.weight", "b.weight"], "c.weight", operations=[operation])
        return SimpleNamespace(_weight_conversions=[conversion], config=None)

    with pytest.raises(NotImplementedError):
        loading.revert_weight_conversion(model(NoReverse()), {"c.weight": torch.zeros(2, 1)})
    state_dict = loading.revert_weight_conversion(
        model(loading.Concatenate(dim=0)), {"c.weight": torch.zeros(2, 1)}
    )
    assert sorted(state_dict) == ["a.weight", "b.weight"]
