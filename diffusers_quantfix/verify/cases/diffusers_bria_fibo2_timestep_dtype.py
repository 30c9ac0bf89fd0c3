"""The timestep embedding of Bria Fibo 2 has 8-bit layers with bfloat16 biases."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Linear8bitLt
    from diffusers.models.transformers.transformer_bria_fibo2 import TimestepEmbedder

    from ..models import eight_bit

    where = eight_bit.device()
    torch.manual_seed(0)
    embedder = TimestepEmbedder(64, mid_size=64, frequency_embedding_size=64).bfloat16().eval()
    for index in (0, 2):
        quantized = Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0)
        quantized.load_state_dict(embedder.mlp[index].state_dict())
        embedder.mlp[index] = quantized
    embedder.bfloat16().requires_grad_(False).to(where)
    with torch.no_grad():
        out = embedder(torch.ones(1, device=where))
    assert out.dtype == torch.bfloat16, f"the embedding of the step is {out.dtype}"
    return "stays in bfloat16"
