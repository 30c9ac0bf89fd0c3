"""Models with torchao int8 weights on the CPU, for the cases."""

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


def int8() -> Any:
    """How ``quantize_`` makes int8 weights; before torchao 0.9 a function."""
    from torchao import quantization

    return (getattr(quantization, "Int8WeightOnlyConfig", None) or quantization.int8_weight_only)()


def written_and_read(work: str) -> str:
    """Write a text encoder from its quantized checkpoint with ``torch.save``, read it and compare the outputs."""
    import torch
    import transformers
    from torchao.quantization import Float8WeightOnlyConfig

    from . import t5

    safe = int(transformers.__version__.partition(".")[0]) >= 5  # before, no weights of torchao
    t5.encoder().save_pretrained(f"{work}/plain")
    options = {"torch_dtype": torch.bfloat16}
    config = transformers.TorchAoConfig(Float8WeightOnlyConfig())
    load = transformers.T5EncoderModel.from_pretrained
    model = load(f"{work}/plain", quantization_config=config, **options)
    model.save_pretrained(f"{work}/quantized", safe_serialization=safe)
    model = load(f"{work}/quantized", **({} if safe else {"use_safetensors": False}), **options)
    torch.save(model, f"{work}/model.pt")
    loaded = torch.load(f"{work}/model.pt", weights_only=False)
    tokens = torch.arange(4)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens)[0], model(tokens)[0]), "the output differs"
    return "the model is written and read"
