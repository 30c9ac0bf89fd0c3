"""transformers-4bit-part-of-checkpoint: a text encoder is loaded of the 4-bit checkpoint of the whole model."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit

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
