"""A text encoder with a torchao config for each layer is loaded by a device map."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig
    from transformers import LlamaConfig, LlamaModel, TorchAoConfig

    torch.manual_seed(0)
    LlamaModel(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            vocab_size=32,
        )
    ).save_pretrained(work)  # fmt: skip
    config = TorchAoConfig(FqnToConfig({"_default": Int8WeightOnlyConfig()}))
    model = LlamaModel.from_pretrained(
        work, dtype=torch.float32, device_map="auto", max_memory={"cpu": 10**9}, quantization_config=config
    )
    assert model(torch.arange(8)[None]).last_hidden_state.isfinite().all(), "the output is not finite"
    return "it is loaded, and runs"
