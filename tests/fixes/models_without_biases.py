"""Models whose linear layers have no biases, quantized by bitsandbytes, and a LoRA for them."""

from __future__ import annotations

from tests.fixes import four_bit
from tests.rig import models


def layers(norm: bool = True, kept: list[str] | None = None):
    """A model of two layers without a bias and a norm between them; parts are kept in float32."""
    import torch
    from diffusers.configuration_utils import ConfigMixin, register_to_config
    from diffusers.loaders import PeftAdapterMixin
    from diffusers.models.modeling_utils import ModelMixin

    class Layers(ModelMixin, ConfigMixin, PeftAdapterMixin):
        _keep_in_fp32_modules = kept

        @register_to_config
        def __init__(self, width: int = 64):
            super().__init__()
            self.to_q = torch.nn.Linear(width, width, bias=False)
            self.norm = torch.nn.LayerNorm(width) if norm else torch.nn.Identity()
            self.out = torch.nn.Linear(width, width, bias=False)

        def forward(self, x):
            return self.out(self.norm(self.to_q(x)))

    return Layers


def quantized(kind, model, gpu, tmp_path, bits: int = 8):
    import torch

    config = models.bnb_config("diffusers", bits)
    folder = models.saved(model, tmp_path)
    with four_bit.skip_for_other_reasons():
        loaded = kind.from_pretrained(folder, quantization_config=config, torch_dtype=torch.bfloat16)
    return loaded if bits == 8 else loaded.to(gpu.devices[0])


def with_lora(model, dtype=None):
    """``model`` with a LoRA in float32, or in ``dtype``."""
    import torch
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype or torch.float32)
    return model
