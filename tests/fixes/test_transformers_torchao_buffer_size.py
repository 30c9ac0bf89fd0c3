"""transformers-torchao-buffer-size: a text encoder with a torchao config for each layer, loaded by a device map."""

from __future__ import annotations

import pytest

from tests.gate import unmet

FIX_ID = "transformers-torchao-buffer-size"
SHOWS = r"not enough values to unpack \(expected 2, got 1\)"

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
quantization = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.skipif(
    bool(unmet("transformers>=5")) or not hasattr(quantization, "FqnToConfig"),
    reason="TorchAoConfig takes a config for each layer from transformers 5 and torchao 0.15 on",
)


def saved(folder):
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    model = LlamaModel(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=32,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    return folder


def load(folder, device_map):
    from transformers import LlamaModel, TorchAoConfig

    config = quantization.FqnToConfig(
        {"_default": quantization.Int8WeightOnlyConfig(), "layers.0.mlp.up_proj": None}
    )
    return LlamaModel.from_pretrained(
        folder, dtype=torch.float32, device_map=device_map, quantization_config=TorchAoConfig(config)
    )


def run(model):
    with torch.no_grad():
        return model(torch.arange(8, device=model.device)[None]).last_hidden_state.cpu()


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
def test_a_device_map_that_is_planned(gpu, tmp_path, device_map):
    folder = saved(tmp_path)
    model = load(folder, device_map)
    assert type(model.layers[0].mlp.up_proj.weight) is torch.nn.Parameter
    for layer in (model.layers[0].mlp.down_proj, model.layers[1].mlp.up_proj):
        assert "Int8" in type(layer.weight.data).__name__ or "Affine" in type(layer.weight.data).__name__
    assert torch.equal(run(model), run(load(folder, {"": gpu.devices[0]})))


def test_an_explicit_device_is_as_ever(gpu, tmp_path):
    model = load(saved(tmp_path), {"": "cpu"})
    assert run(model).isfinite().all()
