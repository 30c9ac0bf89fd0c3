"""A GGUF file with its biases and norms in BF16 is loaded, and run on the CPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch

    from ..models import four_bit, gguf_model

    outputs = []
    for name, rest in (("plain", "F32"), ("packed", "BF16")):
        folder = os.path.join(work, name)
        os.mkdir(folder)
        outputs.append(four_bit.run_flux(gguf_model.flux(folder, rest=rest), "cpu"))
    alike = float(torch.nn.functional.cosine_similarity(*(one.flatten() for one in outputs), dim=0))
    assert alike > 0.999, f"the output differs ({alike:.3f})"
    return f"the output is that of the same file in float32 ({alike:.4f})"
