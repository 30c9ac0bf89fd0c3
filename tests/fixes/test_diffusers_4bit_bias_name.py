"""diffusers-4bit-bias-name: a saved 4-bit layer with "bias" in its name."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

FIX_ID = "diffusers-4bit-bias-name"
SHOWS = r"Expected the flattened shape of the current param \(\S*bias\S*weight\)"
ROWS = 4


def model_class():
    """A model with a layer named after the bias that it computes, as RFD4 Proteina has them."""
    from diffusers import ConfigMixin, ModelMixin
    from diffusers.configuration_utils import register_to_config

    class Paired(ModelMixin, ConfigMixin):
        @register_to_config
        def __init__(self, features: int = 64):
            super().__init__()
            self.layer = torch.nn.Linear(features, features)
            self.to_bias = torch.nn.Linear(features, features)
            self.biases = torch.nn.ModuleList([torch.nn.Linear(features, features, bias=False)])

        def forward(self, x):
            return self.biases[0](self.layer(x)) + self.to_bias(x)

    return Paired


def quantized(cls, folder, **options):
    torch.manual_seed(0)
    cls().save_pretrained(folder / "plain")
    config = models.bnb_config("diffusers", **options)
    with four_bit.skip_for_other_reasons():
        return cls.from_pretrained(folder / "plain", quantization_config=config, torch_dtype=torch.float16)


def run(model):
    x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(x.to(model.device, model.dtype)).float().cpu()


@pytest.mark.parametrize("double_quant", [False, True], ids=["nf4", "nf4-double"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_loaded_again(gpu, tmp_path, double_quant):
    cls = model_class()
    model = quantized(cls, tmp_path, bnb_4bit_use_double_quant=double_quant)
    model.save_pretrained(tmp_path / "saved")
    again = cls.from_pretrained(tmp_path / "saved", torch_dtype=torch.float16)
    four_bit.assert_whole(again, gpu.devices[0])
    assert len(four_bit.layers_of(again)) == 3
    assert not four_bit.differences(four_bit.state_of(model), four_bit.state_of(again))
    assert torch.equal(run(again), run(model))


def test_another_shape_is_still_refused(gpu, tmp_path):
    from safetensors.torch import load_file, save_file

    cls = model_class()
    quantized(cls, tmp_path).save_pretrained(tmp_path / "saved")
    [file] = (tmp_path / "saved").glob("*.safetensors")
    for name in ("to_bias.bias", "to_bias.weight", "layer.bias"):
        tensors = load_file(file)
        cut = {**tensors, name: tensors[name][: len(tensors[name]) // 2].clone()}
        save_file(cut, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"current param \({name}\)|because {name} expected shape"):
            cls.from_pretrained(tmp_path / "saved", torch_dtype=torch.float16)
        save_file(tensors, file, metadata={"format": "pt"})
