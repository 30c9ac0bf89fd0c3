"""int8 weights in rows of 68 with bfloat16 activations on the CPU: a segmentation fault without the fix."""

from __future__ import annotations

MAY_CRASH = True


def case(work: str) -> str | None:
    import torch

    from ..models import quanto_models

    reference = quanto_models.run(quanto_models.plain_layers(None, 68), None, 68, 4)
    output = quanto_models.run(quanto_models.layers("qint8", torch.bfloat16, 68), torch.bfloat16, 68, 4)
    off = quanto_models.error(output, reference)
    assert off < 0.035, f"relative error {off:.3f}"
    return f"rows of 68 int8 weights run; relative error {off:.4f}"
