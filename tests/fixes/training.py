"""A training with LoRAs on two quantized layers, on the CPU, that saves its state."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, four_bit, quanto_models
from tests.gate import unmet

KINDS = ("nf4", "nf4-double", "int8", "quanto-int8", "quanto-float8", "torchao-int8", "torchao-float8")


def layers(kind: str, seed: int):
    """Two quantized layers on the CPU, other ones for every ``seed``."""
    import torch

    library, _, weights = kind.partition("-")
    if library in ("nf4", "int8"):
        pytest.importorskip("bitsandbytes")
    if library == "nf4":
        linear, options = four_bit.linear, {"double_quant": weights == "double"}
        return torch.nn.Sequential(*(linear("cpu", seed=seed + i, **options) for i in range(2)))
    if library == "int8":
        model = torch.nn.Sequential(*(eight_bit.linear("cpu", seed=seed + i) for i in range(2))).float()
        model.is_loaded_in_8bit = True
        return model
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    if library == "quanto":
        quanto = quanto_models.quanto()
        quanto.quantize(model, weights=getattr(quanto, f"q{weights}"))
        quanto.freeze(model)
        return model
    ao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    if weights == "int4":
        config = ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32))
    else:
        config = ao.Int8WeightOnlyConfig(version=2) if weights == "int8" else ao.Float8WeightOnlyConfig()
    ao.quantize_(model, config)
    return model


class Training:
    """LoRAs, with dropout, on `layers`, prepared by an accelerator of their own."""

    def __init__(self, kind: str, seed: int) -> None:
        import torch
        from accelerate import Accelerator
        from peft import LoraConfig, get_peft_model

        self.accelerator = Accelerator(cpu=True)
        model = layers(kind, seed)
        torch.manual_seed(seed)
        # accelerate 0.34.2 does not load the random numbers that a new torch has saved; 1.4.0 does.
        dropout = 0 if unmet("accelerate>=1.4") else 0.1
        config = LoraConfig(r=4, target_modules=["0", "1"], lora_dropout=dropout)
        model = get_peft_model(model, config).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def steps(self, first: int, last: int) -> list[float]:
        """The losses of the steps from ``first`` on, before ``last``."""
        import torch

        losses = []
        features = next(part.in_features for part in self.model.modules() if hasattr(part, "in_features"))
        for step in range(first, last):
            inputs = torch.randn(4, features, generator=torch.Generator().manual_seed(step))
            loss = (self.model(inputs) - 1).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss))
        return losses


def resume(kind: str, folder, **options) -> None:
    """Train, save, and go on in a new training, with other weights until then: bit by bit the same.

    Args:
        options: of ``Accelerator.save_state``.
    """
    import torch

    training = Training(kind, seed=0)
    training.steps(0, 3)
    training.accelerator.save_state(folder, **options)
    expected = training.steps(3, 6)
    resumed = Training(kind, seed=7)
    assert resumed.steps(0, 2)[0] != expected[0]
    resumed.accelerator.load_state(folder)
    assert resumed.steps(3, 6) == expected, "the losses differ"
    inputs = torch.ones(1, 128 if kind.startswith("nf4") else 64)
    with torch.no_grad():
        assert torch.equal(resumed.model.eval()(inputs), training.model.eval()(inputs)), "the weights differ"
