"""Kandinsky's MultilingualCLIP is loaded with torchao."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch
    from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    folder = os.path.join(work, "clip")
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    config = MCLIPConfig(**sizes, num_hidden_layers=2, numDims=64, transformerDimensions=64)
    MultilingualCLIP(config).save_pretrained(folder)
    model = MultilingualCLIP.from_pretrained(
        folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), torch_dtype=torch.bfloat16
    )
    weights = [one for one in model.parameters() if type(one.data).__module__.startswith("torchao")]
    assert weights, "nothing is quantized"
    return f"{len(weights)} weights are quantized"
