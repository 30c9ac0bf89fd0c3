"""A layer with torchao int8 weights and an adapter on the CPU, for the cases."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def adapted(**options: Any) -> Any:
    """A peft model with one Linear layer and a LoRA; ``options`` are those of ``LoraConfig``."""
    import functools
    import types

    import torch
    from peft import LoraConfig, get_peft_model
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16().requires_grad_(False)
    quantize_(model, Int8WeightOnlyConfig())
    # As diffusers and transformers set it on a model that they quantize.
    config = types.SimpleNamespace(get_apply_tensor_subclass=functools.partial(Int8WeightOnlyConfig))
    model.hf_quantizer = types.SimpleNamespace(quantization_config=config)
    return get_peft_model(model, LoraConfig(target_modules=["0"], init_lora_weights=False, **options)).eval()
