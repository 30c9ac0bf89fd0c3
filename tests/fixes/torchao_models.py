"""Small models with weights of torchao."""

from __future__ import annotations

import pytest

WEIGHTS = ("int8", "float8")


def layers(weights: str, device="cpu"):
    """Two layers of 64 features, quantized on the CPU, on ``device``."""
    import torch

    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    if weights == "int8":
        config = quantization.Int8WeightOnlyConfig(version=2)
    else:
        config = quantization.Float8WeightOnlyConfig()
    quantization.quantize_(model, config)
    return model.requires_grad_(False).to(device)


def run(model, device="cpu"):
    import torch

    with torch.no_grad():
        return model(torch.linspace(-1, 1, 128, device=device, dtype=torch.bfloat16).view(2, 64)).cpu()
