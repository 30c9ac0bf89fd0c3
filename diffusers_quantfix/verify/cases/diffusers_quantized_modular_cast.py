"""A modular pipeline with a GGUF transformer and an autoencoder is cast."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers import AutoencoderTiny
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline

    from ..models import gguf_model

    vae = AutoencoderTiny(
        encoder_block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        num_encoder_blocks=(1,),
        num_decoder_blocks=(1,),
    )
    parts = {"vae": vae, "transformer": gguf_model.flux(work)}
    # Its constructor requires the blocks of a model family; the cast needs only the components.
    pipeline = object.__new__(ModularPipeline)
    vars(pipeline).update(parts, _component_specs=dict.fromkeys(parts), hf_device_map=None)
    pipeline.to("cpu", torch.bfloat16)
    assert vae.dtype == torch.bfloat16, f"the autoencoder is in {vae.dtype}"
    return "the autoencoder is in bfloat16, the GGUF transformer is unchanged"
