"""The heads of SigLIP and SigLIP 2 with a quantized layer."""

from __future__ import annotations

import importlib

from ..case import CannotReproduce
from . import four_bit


def runs_with_a_quantized_head(name: str) -> str:
    """Compare the head of ``name`` ("siglip" or "siglip2") with and without a 4-bit output layer in its attention.

    Raises:
        CannotReproduce: this transformers does not have the model.
        AssertionError: the outputs differ.
    """
    import torch

    where = four_bit.device()
    try:
        modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ImportError:
        raise CannotReproduce("needs transformers 4.50, which brought SigLIP 2") from None
    prefix = name.capitalize()
    torch.manual_seed(0)
    config = getattr(modeling, f"{prefix}VisionConfig")(
        hidden_size=64, intermediate_size=64, num_attention_heads=2
    )
    head = getattr(modeling, f"{prefix}MultiheadAttentionPoolingHead")(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.1)
        head = head.to(where).eval()
        inputs = torch.randn(2, 4, 64, device=where)
        expected = head(inputs)
        head.attention.out_proj = four_bit.linear(head.attention.out_proj, where)
        error = ((head(inputs) - expected).norm() / expected.norm()).item()
    assert error < 0.3, f"differs by {error:.0%}"
    return "runs"
