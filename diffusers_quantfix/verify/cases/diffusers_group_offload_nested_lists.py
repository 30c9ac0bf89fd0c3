"""The UNet of Stable Cascade runs under block-level group offloading."""

from __future__ import annotations


def case(work: str) -> str | None:
    from diffusers.models import StableCascadeUNet

    from ..models import group_offload

    unet = StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        conditioning_dim=32,
        block_out_channels=(32, 32),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        clip_text_pooled_in_channels=32,
    ).eval()
    group_offload.by_blocks(unet)
    blocks = [block for level in unet.down_blocks for block in level]
    brought = [block for block in blocks if hasattr(block, "_diffusers_hook")]
    assert len(brought) == len(blocks), "a level is brought when it is called, which it is never"
    return f"each of the {len(blocks)} blocks is brought when it is called"
