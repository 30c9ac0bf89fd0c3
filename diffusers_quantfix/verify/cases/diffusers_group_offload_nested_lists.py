"""The UNet of Stable Cascade runs under block-level group offloading."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import cascade, group_offload

    unet = cascade.prior()
    group_offload.by_blocks(unet)
    blocks = [block for level in unet.down_blocks for block in level]
    brought = [block for block in blocks if hasattr(block, "_diffusers_hook")]
    assert len(brought) == len(blocks), "a level is onloaded when it is called, which never happens"
    return f"each of the {len(blocks)} blocks is onloaded when it is called"
