"""A model with a layer named ``to_bias`` is saved in 4 bits, and loaded."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch

    cuda("diffusers loads 4-bit models on a GPU only")
    from diffusers import BitsAndBytesConfig, ConfigMixin, ModelMixin
    from diffusers.configuration_utils import register_to_config

    class Pair(ModelMixin, ConfigMixin):
        @register_to_config  # type: ignore[untyped-decorator]
        def __init__(self) -> None:
            super().__init__()
            self.to_bias = torch.nn.Linear(64, 64)

    torch.manual_seed(0)
    Pair().save_pretrained(f"{work}/plain")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = Pair.from_pretrained(f"{work}/plain", quantization_config=config, torch_dtype=torch.float16)
    model.save_pretrained(f"{work}/saved")
    again = Pair.from_pretrained(f"{work}/saved", torch_dtype=torch.float16)
    assert torch.equal(again.to_bias.weight.data, model.to_bias.weight.data), "the bytes differ"
    return "the bytes of the layer equal the saved ones"
