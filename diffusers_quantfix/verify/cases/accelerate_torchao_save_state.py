"""The state of a training with torchao weights is saved and loaded."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch
    from accelerate import Accelerator
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def prepared(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        layer = torch.nn.Linear(64, 64)
        quantize_(layer, Int8WeightOnlyConfig(version=2))
        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare(layer.requires_grad_(False))

    inputs = torch.linspace(-1, 1, 64).view(1, 64)
    first, layer = prepared(0)
    first.save_state(f"{work}/state")
    other, loaded = prepared(1)
    other.load_state(f"{work}/state")
    assert torch.equal(loaded(inputs), layer(inputs)), "the weights are not those that were saved"
    return "the loaded weights are those that were saved"
