"""A small model whose blocks have factors in a ``ParameterDict`` or ``ParameterList``, which nobody calls."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes.group_offloaded import net

KINDS = ("LoKr", "LoHa", "ParameterList")
QUANTIZED = "LoKr on 4-bit"


def build(kind: str, device):
    """A model on ``device`` in which the first layer of both blocks is adapted, or is a list of weights."""
    import torch

    torch.manual_seed(0)
    if kind == "ParameterList":
        model = net(lambda seed: torch.nn.Linear(64, 64))
        for block in model.blocks:
            block[0] = _listed()
        return model.to(device)
    pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapter, _, quantized = kind.partition(" on ")
    if quantized:
        model = net(lambda seed: four_bit.linear(device, seed=seed))
    else:
        model = net(lambda seed: torch.nn.Linear(64, 64))
    config = getattr(peft, f"{adapter}Config")(
        r=8, alpha=8, target_modules=["0.0", "1.0"], init_weights=False
    )
    return peft.inject_adapter_in_model(config, model.requires_grad_(False)).to(device).eval()


def _listed():
    import torch

    class Listed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            weights = torch.randn(2, 64, 64) / 8
            self.weights = torch.nn.ParameterList(torch.nn.Parameter(weight) for weight in weights)

        def forward(self, x):
            for weight in self.weights:
                x = torch.nn.functional.linear(x, weight)
            return x

    return Listed()


def run(model, device):
    """The output for two rows, on the CPU."""
    import torch

    features = model.first.in_features
    with torch.no_grad():
        rows = torch.linspace(-1, 1, 2 * features, device=device, dtype=model.first.bias.dtype)
        return model(rows.view(2, features)).cpu()
