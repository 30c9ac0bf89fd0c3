"""A dequantized model is saved, loaded and cast."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import os

    import torch
    from diffusers import FluxTransformer2DModel

    model, how = _quantized(work)
    model.dequantize()
    saved = os.path.join(work, "dequantized")
    model.save_pretrained(saved)
    again = FluxTransformer2DModel.from_pretrained(saved, torch_dtype=model.dtype)
    model.to(torch.float64)
    left = [name for name in ("quantization_method", "is_loaded_in_4bit") if hasattr(model, name)]
    assert not left, f"the dequantized model still has {' and '.join(left)}, so pipelines do not cast it"
    same = sum(
        torch.equal(a.double(), b.cpu()) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )
    return f"dequantized from {how}, saved, loaded and cast; {same} tensors are equal"


def _quantized(work: str) -> tuple[Any, str]:
    """A model that this machine can dequantize without any other patch, and the name of its format."""
    import diffusers
    import torch

    from ..case import NeedsDevice
    from ..models import four_bit, gguf_model

    if torch.cuda.is_available():
        return four_bit.flux(f"{work}/plain", four_bit.device()), "nf4"
    if tuple(int(part) for part in diffusers.__version__.split(".")[:2]) < (0, 42):
        raise NeedsDevice(f"needs a CUDA device: diffusers {diffusers.__version__} dequantizes on a GPU only")
    return gguf_model.flux(work), "GGUF"
