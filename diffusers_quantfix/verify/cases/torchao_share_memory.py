"""A model with weights of torchao is put into shared memory: a segmentation fault without the fix."""

from __future__ import annotations

MAY_CRASH = True


def case(work: str) -> str | None:
    import torch
    from torchao.quantization import quantize_

    from ..models import shared_memory, torchao_model

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16().requires_grad_(False)
    quantize_(model, torchao_model.int8())
    given = torch.linspace(-1, 1, 64, dtype=torch.bfloat16)
    return shared_memory.outputs_stay(model, lambda model: model(given).detach())
