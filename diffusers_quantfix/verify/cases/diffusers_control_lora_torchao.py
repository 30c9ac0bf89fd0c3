"""A Control LoRA is loaded into a Flux transformer with int8 torchao weights."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers import FluxTransformer2DModel, TorchAoConfig
    from torchao.quantization import Int8WeightOnlyConfig

    from ..models import flux, lora

    flux.transformer().save_pretrained(work)
    model = FluxTransformer2DModel.from_pretrained(
        work, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), torch_dtype=torch.bfloat16
    )
    wanted = model.x_embedder.weight.dequantize()
    pipe = lora.pipeline(transformer=model)
    control = lora.weights(model, "transformer")
    control["transformer.x_embedder.lora_A.weight"] = torch.ones(4, 128)
    control["transformer.x_embedder.lora_B.weight"] = torch.ones(64, 4)
    pipe.load_lora_weights(control, adapter_name="control")
    weight = model.x_embedder.base_layer.weight
    assert weight.shape == (64, 128), f"the layer has the shape {tuple(weight.shape)}"
    assert torch.equal(weight[:, :64], wanted), "the weights of the layer changed"
    return "the layer is widened, its weights are the same"
