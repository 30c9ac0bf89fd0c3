"""A diffusers model from a checkpoint quantized by torchao is written with ``torch.save``."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers import FluxTransformer2DModel, TorchAoConfig

    from ..models import flux, torchao_model

    inputs = {name: value.bfloat16() for name, value in flux.inputs().items()}
    options = {"torch_dtype": torch.bfloat16}
    flux.transformer().save_pretrained(f"{work}/plain")
    config = TorchAoConfig(torchao_model.int8())
    model = FluxTransformer2DModel.from_pretrained(f"{work}/plain", quantization_config=config, **options)
    model.save_pretrained(f"{work}/quantized", safe_serialization=False)
    model = FluxTransformer2DModel.from_pretrained(f"{work}/quantized", use_safetensors=False, **options)
    torch.save(model, f"{work}/model.pt")
    loaded = torch.load(f"{work}/model.pt", weights_only=False)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).sample, model(**inputs).sample), "the output differs"
    return "the model is written and read"
