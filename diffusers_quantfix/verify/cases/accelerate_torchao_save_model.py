"""A model with torchao weights is saved by ``Accelerator.save_model`` and loaded."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch
    from accelerate import Accelerator, load_checkpoint_in_model
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def quantized(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64)).requires_grad_(False)
        quantize_(model, Int8WeightOnlyConfig(version=2))
        return model

    inputs = torch.linspace(-1, 1, 64).view(1, 64)
    model, loaded = quantized(0), quantized(1)
    Accelerator(cpu=True).save_model(model, f"{work}/model")
    load_checkpoint_in_model(loaded, f"{work}/model")
    assert torch.equal(loaded(inputs), model(inputs)), "the weights are not those that were saved"
    return "the loaded weights are those that were saved"
