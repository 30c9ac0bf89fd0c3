"""``fuse_lora`` of a GGUF model raises an error, and changes nothing."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..case import CannotReproduce
    from ..models import gguf_model, lora

    pipe = lora.pipeline(transformer=gguf_model.flux(work))
    try:
        lora.load(pipe)
    except RuntimeError as error:
        if "can require gradients" not in str(error):
            raise
        raise CannotReproduce("these releases load no LoRA into a GGUF model") from error
    with_lora = lora.run(pipe)
    try:
        pipe.fuse_lora(components=["transformer"])
    except ValueError as refusal:
        assert "cannot be merged into GGUF weights" in str(refusal), str(refusal)
    assert torch.equal(lora.run(pipe), with_lora), "the output changed"
    return "raises an error that names dequantize(), before anything is merged"
