"""A second pipeline is created from the components of one in bfloat16."""

from __future__ import annotations

from ..case import CannotReproduce

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import diffusers
    import torch

    if tuple(int(part) for part in diffusers.__version__.split(".")[:2]) < (0, 33):
        raise CannotReproduce(
            f"needs a quantized component: diffusers {diffusers.__version__} casts when it is asked to"
        )

    class Pipeline(diffusers.DiffusionPipeline):
        def __init__(self, vae):
            super().__init__()
            self.register_modules(vae=vae)

    # from_pipe reads the annotation as a class, but annotations are strings in this module.
    Pipeline.__init__.__annotations__["vae"] = diffusers.AutoencoderTiny

    vae = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        num_encoder_blocks=(1,),
        num_decoder_blocks=(1,),
    ).to(torch.bfloat16)
    before = _size(vae)
    other = Pipeline.from_pipe(Pipeline(vae))
    after = _size(vae)
    assert other.vae is vae
    assert after == before, f"from_pipe has cast the source to {vae.dtype}: {before} bytes became {after}"
    return f"both pipelines share the autoencoder, still in {vae.dtype} ({after} bytes)"


def _size(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
