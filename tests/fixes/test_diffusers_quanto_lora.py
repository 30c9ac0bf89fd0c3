"""diffusers-quanto-lora: a LoRA for a transformer that quanto has quantized."""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")


@pytest.fixture(scope="module")
def lora():
    """A LoRA of rank 4 for one projection of each kind."""
    import torch

    generator = torch.Generator().manual_seed(1)
    names = ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_k")
    return {
        f"transformer.{name}.lora_{side}.weight": torch.randn(*shape, generator=generator)
        for name in names
        for side, shape in (("A", (4, 64)), ("B", (64, 4)))
    }


def quantized():
    import torch
    from optimum.quanto import freeze, qint8, quantize

    model = models.flux_transformer().to(torch.bfloat16)
    quantize(model, weights=qint8)
    freeze(model)
    return models.flux_pipeline(model)


def run(pipe):
    import torch

    return models.call_flux(pipe, dtype=torch.bfloat16)


def expected(lora):
    """What the adapters give that PEFT itself puts in."""
    import torch
    from peft import LoraConfig

    pipe = quantized()
    targets = sorted({key.removeprefix("transformer.").rpartition(".lora_")[0] for key in lora})
    pipe.transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets), adapter_name="one")
    parameters = dict(pipe.transformer.named_parameters())
    with torch.no_grad():
        for key, value in lora.items():
            name, _, side = key.removeprefix("transformer.").rpartition(".lora_")
            parameters[f"{name}.lora_{side[0]}.one.weight"].copy_(value)
    return run(pipe)


@pytest.mark.defect("diffusers-quanto-lora", shows=r"KeyError: '.*weight'")
def test_a_lora_is_loaded(lora):
    import torch

    pipe = quantized()
    without = run(pipe)
    pipe.load_lora_weights(dict(lora), adapter_name="one")
    output = run(pipe)
    assert not torch.equal(output, without)
    assert torch.equal(output, expected(lora))


def test_a_second_lora_and_none_again(lora):
    import torch

    pipe = quantized()
    without = run(pipe)
    pipe.load_lora_weights(dict(lora), adapter_name="one")
    pipe.load_lora_weights({key: -value for key, value in lora.items()}, adapter_name="two")
    pipe.set_adapters("one")
    assert torch.equal(run(pipe), expected(lora))
    pipe.unload_lora_weights()
    assert torch.equal(run(pipe), without)


def test_what_the_view_does_not_change(lora):
    """A LoRA for fewer input features is still padded."""
    import torch

    if reason := unmet("diffusers>=0.32"):
        pytest.skip(reason)
    narrow = {key: value[:, :32] if "lora_A" in key else value for key, value in lora.items()}
    pipe = quantized()
    pipe.load_lora_weights(narrow, adapter_name="one")
    padded = {
        key: torch.nn.functional.pad(value, (0, 32)) if "lora_A" in key else value
        for key, value in narrow.items()
    }
    assert torch.equal(run(pipe), expected(padded))
