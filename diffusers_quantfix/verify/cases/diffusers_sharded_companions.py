"""A 4-bit layer is saved in two files, the weight in one and its quant state in the other, and loaded."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import os

    import torch
    from bitsandbytes.nn import Linear4bit
    from diffusers import BitsAndBytesConfig
    from diffusers.models.modeling_utils import ModelMixin
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer
    from safetensors.torch import save_file

    from ..models import four_bit

    class Model(ModelMixin):
        def __init__(self):
            super().__init__()
            self.layer = Linear4bit(64, 64, bias=False, quant_type="nf4", device="meta")

    where = four_bit.device()
    source = four_bit.linear(torch.nn.Linear(64, 64, bias=False), where)
    saved = {f"layer.{name}": tensor.cpu() for name, tensor in source.state_dict().items()}
    apart = {"layer.weight": saved.pop("layer.weight")}
    together = {**apart, **saved}

    def load(*parts: dict[str, Any]) -> Model:
        files = [os.path.join(work, f"{number}-of-{len(parts)}.safetensors") for number in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            save_file(part, file, metadata={"format": "pt"})
        model = Model()
        quantizer = BnB4BitDiffusersQuantizer(BitsAndBytesConfig(load_in_4bit=True), pre_quantized=True)
        model._load_pretrained_model(
            model, None, files, work, list(together), hf_quantizer=quantizer, low_cpu_mem_usage=True,
            device_map={"": where}, dtype=torch.float32, keep_in_fp32_modules=[],
        )  # fmt: skip
        return model

    inputs = torch.linspace(-1, 1, 64).view(1, 64).to(where)
    with torch.no_grad():
        expected = load(together).layer(inputs)
        assert torch.equal(load(apart, saved).layer(inputs), expected), (
            "the output differs from that of one file"
        )
    return "loaded the layer from two files; output exact"
