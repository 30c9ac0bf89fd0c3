"""ControlNets made from tiny models with 8-bit weights."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def made(kind: str, source: Any) -> Any:
    """The ControlNet of ``source``; ``kind`` is "flux", "hunyuan" or "sparse". diffusers 0.31 has none for SD3."""
    import diffusers

    if kind == "sparse":
        return diffusers.SparseControlNetModel.from_unet(source)
    if kind == "hunyuan":
        return diffusers.HunyuanDiT2DControlNetModel.from_transformer(source, transformer_num_layers=4)
    config = source.config
    return diffusers.FluxControlNetModel.from_transformer(
        source,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=config.attention_head_dim,
        num_attention_heads=config.num_attention_heads,
    )


def source(kind: str) -> Any:
    """A random model, float32 on the CPU, equal at each call."""
    import diffusers
    import torch

    from . import flux

    torch.manual_seed(0)
    if kind == "sparse":
        return diffusers.UNet2DConditionModel(
            block_out_channels=(32, 32),
            down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],  # a list, as from a file
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=8,
            layers_per_block=1,
        )
    if kind == "hunyuan":
        return diffusers.HunyuanDiT2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            patch_size=2,
            activation_fn="gelu-approximate",
            sample_size=8,
            hidden_size=32,
            num_layers=4,
            cross_attention_dim=32,
            cross_attention_dim_t5=32,
        )
    return flux.transformer()


def layer_of(kind: str, model: Any) -> Any:
    """A linear layer that is copied, in the source or in the ControlNet."""
    if kind == "sparse":
        return model.down_blocks[0].attentions[0].transformer_blocks[0].attn1.to_q
    if kind == "hunyuan":
        return model.blocks[0].attn1.to_q
    return model.transformer_blocks[0].attn.to_q


def refused(kind: str) -> str:
    """Make a ControlNet from a model with one 8-bit weight.

    Raises:
        AssertionError: it was made.
    """
    import torch
    from bitsandbytes.nn import Int8Params

    model = source(kind)
    layer = layer_of(kind, model)
    # As after quantization by bitsandbytes.
    data = torch.full(layer.weight.shape, 127, dtype=torch.int8)
    layer.weight = Int8Params(data, requires_grad=False, has_fp16_weights=False)
    try:
        new = made(kind, model)
    except ValueError as error:
        assert "quantized" in str(error), str(error)
        return "refused before anything is made"
    largest = layer_of(kind, new).weight.abs().max().item()
    raise AssertionError(f"no error, and a weight of the ControlNet is {largest:g}")
