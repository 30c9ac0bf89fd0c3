"""A pipeline with a GGUF transformer and an autoencoder is cast."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers import AutoencoderTiny, DiffusionPipeline

    from ..models import gguf_model

    class Pipeline(DiffusionPipeline):
        def __init__(self, vae, transformer):
            super().__init__()
            self.register_modules(vae=vae, transformer=transformer)

    vae = AutoencoderTiny(
        encoder_block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        num_encoder_blocks=(1,),
        num_decoder_blocks=(1,),
    )
    pipeline = Pipeline(vae, gguf_model.flux(work))
    before = {parameter.dtype for parameter in pipeline.transformer.parameters()}
    pipeline.to("cpu", torch.bfloat16)
    after = {parameter.dtype for parameter in pipeline.transformer.parameters()}
    assert vae.dtype == torch.bfloat16, f"the autoencoder is in {vae.dtype}"
    assert after == before, f"the dtypes of the GGUF transformer changed from {before} to {after}"
    return "the autoencoder is in bfloat16, the GGUF transformer is unchanged"
