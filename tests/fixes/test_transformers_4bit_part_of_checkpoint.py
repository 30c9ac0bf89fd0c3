"""transformers-4bit-part-of-checkpoint: a text encoder is loaded of the 4-bit checkpoint of the whole model."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

FIX_ID = "transformers-4bit-part-of-checkpoint"
SHOWS = "has no attribute `decoder`"


@pytest.fixture
def whole(gpu, tmp_path):
    """A 4-bit T5 with its decoder, and the folder that it was saved to."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "plain")

    def make(**options):
        model = four_bit.load(
            T5ForConditionalGeneration, tmp_path / "plain", device_map={"": str(gpu.devices[0])}, **options
        )
        model.save_pretrained(tmp_path / "quantized", max_shard_size="100KB")
        return model.eval(), tmp_path / "quantized"

    return make


def encode(model, device):
    with torch.no_grad():
        return model(torch.tensor([[2, 5, 6, 3]], device=device)).last_hidden_state


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("double_quant", [False, True])
def test_the_encoder_alone(gpu, whole, double_quant):
    from transformers import T5EncoderModel

    device = gpu.devices[0]
    model, folder = whole(bnb_4bit_use_double_quant=double_quant)
    with four_bit.skip_for_other_reasons():
        encoder = T5EncoderModel.from_pretrained(folder, device_map={"": str(device)}).eval()
    assert torch.equal(encode(encoder, device), encode(model.encoder, device))
    assert not any(parameter.is_meta for parameter in encoder.parameters())


def test_the_encoder_is_saved(gpu, whole):
    from transformers import T5EncoderModel

    device = gpu.devices[0]
    model, folder = whole()
    encoder = T5EncoderModel.from_pretrained(folder, device_map={"": str(device)})
    encoder.save_pretrained(folder.parent / "encoder")
    again = T5EncoderModel.from_pretrained(folder.parent / "encoder", device_map={"": str(device)}).eval()
    assert torch.equal(encode(again, device), encode(model.encoder, device))


def test_the_whole_model_loads_as_before(gpu, whole):
    from transformers import T5ForConditionalGeneration

    model, folder = whole()
    with four_bit.skip_for_other_reasons():
        again = T5ForConditionalGeneration.from_pretrained(folder, device_map={"": str(gpu.devices[0])})
    expected, found = model.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def composite(name):
    """A model of a vision and a language part, as the text encoders of Qwen-Image and HunyuanVideo are."""
    import transformers

    text = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    if name == "LlavaForConditionalGeneration":
        vision = transformers.CLIPVisionConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=32,
            patch_size=8,
        )  # fmt: skip
        return transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**text))
    rope = {"type": "default", "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64,
        "fullatt_block_indexes": [0], "window_size": 16, "patch_size": 4,
    }  # fmt: skip
    return transformers.Qwen2_5_VLConfig(text_config={**text, "rope_scaling": rope}, vision_config=vision)


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("name", ["Qwen2_5_VLForConditionalGeneration", "LlavaForConditionalGeneration"])
def test_a_composite_model_keeps_its_quant_states(tmp_path, name, double_quant):
    """Whole, and its part below the head (its quant states are said to be lost in transformers 5.4 and 5.5)."""
    import transformers

    if sentence := unmet("bitsandbytes>=0.46") or unmet("transformers>=5.0"):
        pytest.skip(sentence)
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    cls(composite(name)).save_pretrained(tmp_path / "plain")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.float32,
    )
    options = {"device_map": {"": "cpu"}, "dtype": torch.float32}
    model = cls.from_pretrained(tmp_path / "plain", quantization_config=config, **options).eval()
    model.save_pretrained(tmp_path / "quantized")
    whole = cls.from_pretrained(tmp_path / "quantized", **options).eval()
    ids = torch.tensor([[2, 5, 6, 3]])
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids).logits, model(input_ids=ids).logits)
    packed = [p for p in whole.parameters() if type(p).__name__ == "Params4bit"]
    assert len(packed) > 20 and all(p.quant_state is not None for p in packed)
    load = transformers.AutoModel.from_pretrained
    if load(tmp_path / "plain", output_loading_info=True, **options)[1]["missing_keys"]:
        pytest.skip("this transformers does not load the part of a plain checkpoint either")
    part = load(tmp_path / "quantized", **options).eval()
    with torch.no_grad():
        assert torch.equal(
            part(input_ids=ids).last_hidden_state, model.model(input_ids=ids).last_hidden_state
        )
