"""A ControlNet is made of a transformer with 8-bit weights."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Int8Params
    from diffusers import FluxControlNetModel

    from ..models import flux

    transformer = flux.transformer()
    layer = transformer.transformer_blocks[0].attn.to_q
    # As bitsandbytes has it after it has quantized the layer.
    data = torch.full(layer.weight.shape, 127, dtype=torch.int8)
    layer.weight = Int8Params(data, requires_grad=False, has_fp16_weights=False)
    config = transformer.config
    try:
        made = FluxControlNetModel.from_transformer(
            transformer,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=config.attention_head_dim,
            num_attention_heads=config.num_attention_heads,
        )
    except ValueError as error:
        assert "quantized" in str(error), str(error)
        return "refused before anything is made"
    largest = made.transformer_blocks[0].attn.to_q.weight.abs().max().item()
    raise AssertionError(f"no error, and a weight of the ControlNet is {largest:g}")
