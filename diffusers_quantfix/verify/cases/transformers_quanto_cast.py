"""A T5 encoder that quanto quantized is cast."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch
    from transformers import QuantoConfig, T5Config, T5EncoderModel

    folder = os.path.join(work, "t5")
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2)
    T5EncoderModel(config).save_pretrained(folder)
    model = T5EncoderModel.from_pretrained(
        folder, quantization_config=QuantoConfig(weights="int8"), torch_dtype=torch.float16
    ).eval()
    before = [parameter.dtype for parameter in model.parameters()]
    try:
        model.bfloat16()
    except ValueError as error:
        message = str(error)
    else:
        message = "nothing"
    after = [parameter.dtype for parameter in model.parameters()]
    changed = sum(one != other for one, other in zip(before, after, strict=True))
    assert not changed, f"{changed} of {len(before)} weights were cast, then: {message}"
    return "refused before anything was changed"
