"""A small autoencoder without modules to keep in float32 is cast."""

from __future__ import annotations


def case(work: str) -> str | None:
    import logging

    import torch
    from diffusers import AutoencoderTiny
    from diffusers.models import modeling_utils

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    model = AutoencoderTiny(
        encoder_block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        num_encoder_blocks=(1,),
        num_decoder_blocks=(1,),
    )
    modeling_utils.logger.addHandler(handler)
    try:
        model.to(torch.bfloat16)
    finally:
        modeling_utils.logger.removeHandler(handler)
    assert not said, f"a cast warns: {said[0]}"
    return f"cast to {model.dtype} without a warning"
