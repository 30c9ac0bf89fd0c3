"""A LoRA is trained on every kind of quantized weight: its gradients are those of the dequantized model.

In the placements in which a plain model gives gradients. Under sequential offload this package refuses. Under group
offload it needs whole blocks and checkpointing: elsewhere plain weights have left when the backward pass wants them,
which is upstream's own error, for a plain model too.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.gate import unmet
from tests.rig import models
from tests.sweep.backends import ALL_BACKENDS, in_turn
from tests.sweep.placements import PLACEMENTS

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(unmet("diffusers>=0.42")), reason="the sweep is about the newest releases"),
    pytest.mark.skipif(bool(unmet("peft")), reason="peft is not installed"),
]

PLACED = ["to", "there and back", "to the other", "model offload"]
CIRCUMSTANCES = ["", "checkpointing", "autocast", "after inference", "after a run on the CPU"]
# Relative error of all gradients together. Layers compute with the dequantized weight, in float32 here; those of
# bitsandbytes in 8 bits also round their inputs to 8 bits.
TOLERANCE = {"bnb-int8": 0.03}
ELSEWHERE = 1e-4
# The factors of the LoRA, and what the layers above them give, are rounded to bfloat16 under autocast.
AUTOCAST = 0.03


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models.saved(models.flux_transformer(), tmp_path_factory.mktemp("flux"))


def inputs(device) -> dict:
    import torch

    generator = torch.Generator().manual_seed(0)
    given = {
        "hidden_states": torch.randn(1, 16, 64, generator=generator),
        "encoder_hidden_states": torch.randn(1, 8, 64, generator=generator),
        "pooled_projections": torch.randn(1, 64, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    return {name: tensor.to(device) for name, tensor in given.items()} | {"return_dict": False}


def with_lora(model):
    import torch
    from peft import LoraConfig

    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def gradients(model, device, autocast: bool = False, times: int = 1) -> dict:
    """Of one backward pass, which is the same for each of ``times``."""
    import torch

    found: dict = {}
    for _ in range(times):
        context = torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext()
        with context:
            output = model(**inputs(device))[0]
        output.float().pow(2).mean().backward()
        now = {name: one.grad.cpu() for name, one in model.named_parameters() if one.grad is not None}
        model.zero_grad()
        assert not found or all(torch.equal(now[name], found[name]) for name in found), "another time, others"
        found = now
    return found


def error(found: dict, expected: dict) -> float:
    """Of all gradients together, relative to their length."""
    off = sum((found[name] - expected[name]).pow(2).sum() for name in expected)
    return float((off / sum(one.pow(2).sum() for one in expected.values())).sqrt())


_references: dict = {}


def reference(backend, saved, here) -> dict:
    """The gradients of the dequantized model."""
    import torch

    # The numbers do not depend on the storage, but diffusers' `dequantize` rounds to it: its `model.dtype`.
    backend = "bnb-nf4" if backend.startswith("bnb-nf4-") and "float" in backend else backend
    if backend not in _references:
        model = ALL_BACKENDS[backend](saved, torch.float32, None).to(here)
        if backend != "plain":
            model.dequantize()
        _references[backend] = gradients(with_lora(model.to(torch.float32)), here)
    return _references[backend]


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
@pytest.mark.parametrize("placement", PLACED)
@pytest.mark.parametrize("backend", in_turn())
def test_gradients(gpu, backend, placement, circumstance, saved):
    import torch

    load = ALL_BACKENDS[backend]
    expected = reference(backend, saved, gpu.devices[0])
    model = load(saved, torch.float32, None)
    if circumstance == "after a run on the CPU":
        model.to("cpu")
        with torch.no_grad():
            model(**inputs("cpu"))
    model = with_lora(model)
    device = PLACEMENTS[placement](models.flux_pipeline(model), gpu.devices[0], gpu.devices[-1])
    if circumstance == "after inference":
        with torch.no_grad():
            model(**inputs(device))
    if circumstance == "checkpointing":
        model.enable_gradient_checkpointing()
    found = gradients(model, device, circumstance == "autocast", times=2)
    assert found.keys() == expected.keys() and len(found) == 14
    off = error(found, expected)
    allowed = max(TOLERANCE.get(backend, ELSEWHERE), AUTOCAST if circumstance == "autocast" else 0)
    assert off <= allowed, f"relative error of the gradients: {off:.2g}"


@pytest.mark.parametrize("backend", in_turn())
def test_sequential_offload(gpu, backend, saved):
    """The refusal changes nothing, and the model trains when it is not offloaded any more."""
    import torch

    device = gpu.devices[0]
    model = with_lora(ALL_BACKENDS[backend](saved, torch.float32, None))
    pipe = models.flux_pipeline(model)
    PLACEMENTS["sequential"](pipe, device, gpu.devices[-1])
    before = models.call_flux(pipe, device=device, dtype=torch.float32)
    for _ in range(2):
        with pytest.raises(ValueError, match="no gradient reaches them"):
            gradients(model, device)
        model.enable_gradient_checkpointing()
    assert torch.equal(models.call_flux(pipe, device=device, dtype=torch.float32), before)
    model.disable_gradient_checkpointing()
    pipe.remove_all_hooks()
    found, expected = gradients(model.to(device), device), reference(backend, saved, device)
    assert found.keys() == expected.keys()
    assert error(found, expected) <= TOLERANCE.get(backend, ELSEWHERE)


GROUPED = [name for name in PLACEMENTS if name.startswith("group")]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("placement", GROUPED)
@pytest.mark.parametrize("backend", in_turn())
def test_group_offload(gpu, backend, placement, checkpointing, saved):
    """Exact, whether the backward pass computes blocks again or finds the weights where it used them."""
    import torch

    device = gpu.devices[0]
    model = with_lora(ALL_BACKENDS[backend](saved, torch.float32, None))
    PLACEMENTS[placement](models.flux_pipeline(model), device, gpu.devices[-1])
    if checkpointing:
        model.enable_gradient_checkpointing()
    found = gradients(model, device, times=2)
    assert error(found, reference(backend, saved, device)) <= TOLERANCE.get(backend, ELSEWHERE)


@pytest.mark.parametrize("placement", [name for name in GROUPED if "block" in name])
@pytest.mark.parametrize("backend", in_turn())
def test_steps_under_group_offload(gpu, backend, placement, saved):
    """Three steps of the optimizer, and a run in between, lead where they lead without offloading."""
    import torch

    def trained(place):
        model = with_lora(ALL_BACKENDS[backend](saved, torch.float32, None))
        device = PLACEMENTS[place](models.flux_pipeline(model), gpu.devices[0], gpu.devices[-1])
        model.enable_gradient_checkpointing()

        def make(parameters):
            return torch.optim.AdamW(parameters, lr=LEARNING_RATE)

        return steps(model, device, make, resumed=False)

    found, expected = trained(placement), trained("to")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("placement", [name for name in GROUPED if "block" in name])
def test_a_merge_after_steps_under_group_offload(gpu, placement, saved):
    """The blocks are still on the device, with what the last step wrote."""
    import torch

    def merged(place):
        model = with_lora(ALL_BACKENDS["plain"](saved, torch.float32, None))
        device = PLACEMENTS[place](models.flux_pipeline(model), gpu.devices[0], gpu.devices[-1])
        model.enable_gradient_checkpointing()
        steps(
            model, device, lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE), resumed=False
        )
        model.fuse_lora()
        with torch.no_grad():
            return model(**inputs(device))[0].cpu()

    torch.testing.assert_close(merged(placement), merged("to"), atol=1e-5, rtol=1e-4)


# How far three steps may lead from those of torch's AdamW, relative to their length: the states have 8 bits.
EIGHT_BIT_STATE = 0.1
LEARNING_RATE = 1e-2


def steps(model, device, make, resumed: bool) -> dict:
    """The LoRA after three steps; ``resumed``: the third after optimizer and LoRA were saved and loaded anew."""
    import io

    import torch

    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    optimizer = make(trained.values())
    for step in range(3):
        if resumed and step == 2:
            file = io.BytesIO()
            torch.save((optimizer.state_dict(), {name: one.detach() for name, one in trained.items()}), file)
            file.seek(0)
            state, values = torch.load(file)
            optimizer = make(trained.values())
            optimizer.load_state_dict(state)
            with torch.no_grad():
                for name, one in trained.items():
                    one.zero_().copy_(values[name])
        loss = model(**inputs(device))[0].float().pow(2).mean()
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.detach().cpu() for name, one in trained.items()}


@pytest.mark.skipif(
    bool(unmet("bitsandbytes>=0.50")), reason="bitsandbytes 0.50 has kernels of its optimizers for the CPU"
)
@pytest.mark.parametrize("kind", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit"])
@pytest.mark.parametrize("placement", ["to", "model offload"])
@pytest.mark.parametrize("backend", ["bnb-nf4", "bnb-int8", "quanto-int8"])
def test_8bit_optimizers(gpu, backend, placement, kind, saved):
    """As near to torch's AdamW, and to the Lion of 32 bits, as 8 bits allow; saved and resumed bit by bit."""
    import bitsandbytes
    import torch

    def trained(make, resumed=False):
        model = with_lora(ALL_BACKENDS[backend](saved, torch.float32, None))
        device = PLACEMENTS[placement](models.flux_pipeline(model), gpu.devices[0], gpu.devices[-1])
        return steps(model, device, make, resumed)

    def make(parameters):
        # Smaller parameters have states of 32 bits otherwise.
        return getattr(bitsandbytes.optim, kind)(parameters, lr=LEARNING_RATE, min_8bit_size=1)

    found, resumed = trained(make), trained(make, resumed=True)
    assert all(torch.equal(found[name], resumed[name]) for name in found)
    exact = bitsandbytes.optim.Lion32bit if kind == "Lion8bit" else torch.optim.AdamW
    expected = trained(lambda parameters: exact(parameters, lr=LEARNING_RATE))
    start = trained(lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    length = sum((expected[name] - start[name]).pow(2).sum() for name in start).sqrt()
    off = sum((found[name] - expected[name]).pow(2).sum() for name in start).sqrt() / length
    assert 0 < off <= EIGHT_BIT_STATE, f"relative difference to AdamW: {off:.2g}"
