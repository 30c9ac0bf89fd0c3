"""transformers-torchao-embeddings: models without input embeddings cannot be loaded with torchao."""

from __future__ import annotations

import pytest

from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("torchao.quantization", reason="torchao is not installed")

FIX_ID = "transformers-torchao-embeddings"
SHOWS = r"get_input_embeddings|NotImplementedError|issues during automatic conversion of the weights"


def multilingual():
    from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP

    config = MCLIPConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        numDims=64,
        transformerDimensions=64,
    )
    return MultilingualCLIP(config)


def clap():
    from transformers import ClapConfig, ClapModel

    text = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "projection_dim": 64,
    }
    audio = {
        "patch_embeds_hidden_size": 64,
        "depths": [1, 1],
        "num_attention_heads": [2, 2],
        "hidden_size": 128,
        "spec_size": 64,
        "window_size": 4,
        "num_mel_bins": 16,
        "projection_dim": 64,
    }
    return ClapModel(ClapConfig(text_config=text, audio_config=audio))


def quantized(folder, make):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    torch.manual_seed(0)
    plain = make()
    plain.save_pretrained(folder)
    return plain, type(plain).from_pretrained(
        folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), torch_dtype=torch.bfloat16
    )


@pytest.mark.parametrize("make", [multilingual, clap])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_loaded(tmp_path, make):
    plain, model = quantized(tmp_path, make)
    weights = dict(plain.named_parameters())
    found = [
        name for name, one in model.named_parameters() if type(one.data).__module__.startswith("torchao")
    ]
    assert found, "nothing is quantized"
    for name in found:
        weight = model.get_parameter(name).dequantize().float()
        expected = weights[name].detach()
        assert (weight - expected).abs().max() <= 0.02 * expected.abs().max(), name
    with pytest.raises(NotImplementedError):  # as before
        model.get_input_embeddings()


def test_another_model_keeps_its_embeddings(tmp_path):
    from tests.rig import models

    _, model = quantized(tmp_path, models.t5_encoder)
    assert isinstance(model.get_input_embeddings(), torch.nn.Embedding)


@pytest.mark.skipif(
    bool(unmet("transformers>=5")),
    reason="transformers 4 loads any torchao model in two threads with 'multiple values for argument', now and then: "
    "accelerate's init_empty_weights is for the whole process",
)
def test_two_threads(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    dtype = torch.get_default_dtype()
    try:
        with ThreadPoolExecutor(2) as pool:
            loaded = list(pool.map(lambda name: quantized(tmp_path / name, multilingual)[1], ["one", "two"]))
    finally:  # `from_pretrained` sets it for the whole process, and two at once may leave it
        torch.set_default_dtype(dtype)
    for (name, one), other in zip(loaded[0].named_parameters(), loaded[1].parameters(), strict=True):
        assert type(one) is type(other), name
        assert "get_input_embeddings" not in vars(loaded[0])


def test_a_load_that_is_interrupted(tmp_path, monkeypatch):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig
    from transformers.quantizers import quantizer_torchao

    if sentence := _not_applied():
        pytest.skip(sentence)
    quantizer = quantizer_torchao.TorchAoHfQuantizer(TorchAoConfig(Int8WeightOnlyConfig()))
    model = multilingual()

    class Stopped(KeyboardInterrupt):
        pass

    def stop(*args, **kwargs):
        raise Stopped

    monkeypatch.setattr(quantizer, "get_modules_to_not_convert", stop)
    with pytest.raises(Stopped):
        quantizer._process_model_before_weight_loading(model)
    # Another attempt with the same model, to its end.
    monkeypatch.undo()
    quantizer._process_model_before_weight_loading(model)
    quantizer._process_model_after_weight_loading(model)
    assert "get_input_embeddings" not in vars(model)


def _not_applied() -> str:
    import diffusers_quantfix as qf

    state = {one.id: one.state for one in qf.status()}[FIX_ID]
    return "" if str(state) == "applied" else f"not applied: {state}"
