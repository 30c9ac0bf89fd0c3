"""transformers-8bit-ignored-companions: a class that ignores keys of modules that it has, in 8 bits."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

FIX_ID = "transformers-8bit-ignored-companions"
SHOWS = "x not in list"


def of_bert():
    """A BERT that ignores what matches "layer.0", and has that layer."""
    from transformers import BertConfig, BertModel

    class Encoder(BertModel):
        _keys_to_ignore_on_load_unexpected = [r"layer\.0"]  # noqa: RUF012

    return Encoder, BertConfig(**SIZES)


def of_alt_diffusion():
    """The text encoder of AltDiffusion, as diffusers has it."""
    roberta = pytest.importorskip("diffusers.pipelines.deprecated.alt_diffusion.modeling_roberta_series")
    config = roberta.RobertaSeriesConfig(**SIZES, project_dim=32, pad_token_id=1)
    return roberta.RobertaSeriesModelWithTransformation, config


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture
def saved(gpu, tmp_path):
    """Quantize an encoder in 8 bits and save it: the model, and its folder."""
    from transformers import BitsAndBytesConfig

    def make(kind, config):
        torch.manual_seed(0)
        kind(config).save_pretrained(tmp_path / "plain")
        with four_bit.skip_for_other_reasons():
            model = kind.from_pretrained(
                tmp_path / "plain",
                quantization_config=BitsAndBytesConfig(load_in_8bit=True),
                device_map={"": str(gpu.devices[0])},
                torch_dtype=torch.float16,
            )
        model.save_pretrained(tmp_path / "quantized")
        return model.eval(), tmp_path / "quantized"

    return make


def encode(model, device):
    with torch.no_grad():
        outputs = model(
            input_ids=torch.tensor([[2, 5, 6, 3]], device=device),
            attention_mask=torch.ones(1, 4, dtype=torch.long, device=device),
        )
    return torch.cat([one.flatten() for one in outputs.values() if isinstance(one, torch.Tensor)])


# bitsandbytes 0.48.0 quantizes what it loads once more: bnb-int8-prequantized
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes!=0.48.0")
@pytest.mark.parametrize("encoder", [of_bert, of_alt_diffusion])
def test_the_checkpoint_is_loaded(gpu, saved, encoder):
    kind, config = encoder()
    device = gpu.devices[0]
    model, folder = saved(kind, config)
    again = kind.from_pretrained(folder, device_map={"": str(device)}, torch_dtype=torch.float16).eval()
    assert torch.equal(encode(again, device), encode(model, device))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_nothing_is_called_unexpected(gpu, saved):
    kind, config = of_bert()
    _, folder = saved(kind, config)
    _, said = kind.from_pretrained(
        folder, device_map={"": str(gpu.devices[0])}, torch_dtype=torch.float16, output_loading_info=True
    )
    assert not said["unexpected_keys"]
    assert not said["missing_keys"]


def test_a_class_that_ignores_nothing(gpu, saved):
    from transformers import BertConfig, BertModel

    device = gpu.devices[0]
    model, folder = saved(BertModel, BertConfig(**SIZES))
    again = BertModel.from_pretrained(folder, device_map={"": str(device)}, torch_dtype=torch.float16).eval()
    assert torch.equal(encode(again, device), encode(model, device))
