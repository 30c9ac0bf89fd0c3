"""quanto-fp8-plain: float8 weights are repacked for Marlin without being asked."""

from __future__ import annotations

import pytest

import diffusers_quantfix as qf
from tests.fixes import quanto_kernels
from tests.fixes import quanto_models as q

FIX_ID = "quanto-fp8-plain"
SHOWS = r"is a MarlinF8QBytesTensor"


def quantized(device, dtype=None, qtype: str = "qfloat8"):
    """Two layers of float16, quantized on the device."""
    import torch

    library = q.quanto()
    model = q.plain_layers(dtype or torch.float16).to(device)
    library.quantize(model, weights=getattr(library, qtype))
    library.freeze(model)
    return model


def assert_plain(model) -> None:
    for layer in model:
        assert type(layer.weight).__name__ == "WeightQBytesTensor", f"is a {type(layer.weight).__name__}"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_on_a_gpu_takes_the_plain_path(gpu, monkeypatch):
    import torch

    q.quanto()
    quanto_kernels.capable(monkeypatch)
    device = gpu.devices[0]
    model = quantized(device)
    assert_plain(model)
    output = q.run(model, torch.float16, device=device)
    assert q.error(output, q.run(q.plain_layers())) < q.TOLERANCE["float8"]


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_that_moves_to_a_gpu_stays_as_it_is(gpu, monkeypatch):
    """``pipe.to("cuda")`` of what was quantized or loaded on the CPU."""
    import torch

    q.quanto()
    quanto_kernels.capable(monkeypatch)
    model = q.layers("qfloat8", torch.float16)
    reference = q.run(model, torch.float16)
    model.to(gpu.devices[0])
    assert_plain(model)
    assert q.error(q.run(model, torch.float16, device=gpu.devices[0]), reference) < 0.005


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_checkpoint_is_loaded_onto_a_gpu(gpu, monkeypatch):
    import torch

    library = q.quanto()
    quanto_kernels.capable(monkeypatch)
    saved = q.layers("qfloat8", torch.float16)
    model = q.plain_layers(torch.float16).to(gpu.devices[0])
    library.requantize(model, saved.state_dict(), library.quantization_map(saved), device=gpu.devices[0])
    assert_plain(model)


@pytest.fixture
def marlin(monkeypatch):
    """The user has chosen Marlin."""
    q.quanto()
    q.quanto()
    monkeypatch.setenv("DIFFUSERS_QUANTFIX", "quanto:marlin")
    qf.revert(FIX_ID)
    assert qf.apply(FIX_ID)[FIX_ID].state == "applied"
    assert qf.status().settings["options"] == ["quanto:marlin"]
    yield
    monkeypatch.undo()
    qf.revert(FIX_ID)
    qf.apply(FIX_ID)


def test_marlin_by_choice_with_its_bias(gpu, monkeypatch, marlin):
    import torch

    q.quanto()
    device = gpu.devices[0]
    quanto_kernels.capable(monkeypatch)
    quanto_kernels.registered(monkeypatch, lib=object())
    model = quantized(device)
    assert type(model[0].weight).__name__ == "MarlinF8QBytesTensor"
    output = q.run(model, torch.float16, device=device)
    assert q.error(output, q.run(q.plain_layers())) < q.TOLERANCE["float8"]


def test_marlin_by_choice_that_cannot_be_compiled_is_the_plain_path(gpu, monkeypatch, marlin):
    q.quanto()
    quanto_kernels.capable(monkeypatch)
    quanto_kernels.registered(monkeypatch, lib=quanto_kernels.stand_in())
    assert_plain(quantized(gpu.devices[0]))


def test_packed_data_stays_packed(gpu, monkeypatch):
    """From GPU to GPU, and in a deep copy: no repacking behind the user's back."""
    import copy

    import torch

    q.quanto()
    quanto_kernels.capable(monkeypatch)
    packed, plain, _ = quanto_kernels.marlin_weight(gpu.devices[0])
    moved = packed.to(gpu.devices[-1])
    assert type(moved) is type(packed)
    assert moved.device == gpu.devices[-1] == moved._data.device
    assert q.error(moved.dequantize(), plain.dequantize()) == 0
    parameter = torch.nn.Parameter(packed, requires_grad=False)
    assert type(copy.deepcopy(parameter)) is type(packed)


def test_int8_is_upstreams_business(gpu, monkeypatch):
    q.quanto()
    quanto_kernels.capable(monkeypatch)
    assert_plain(quantized(gpu.devices[0], qtype="qint8"))


def test_compile_and_gradients():
    import torch

    model = q.layers("qfloat8", torch.float32)
    given = q.inputs().requires_grad_(True)
    output = torch.compile(model, backend="eager", fullgraph=True)(given)
    output.sum().backward()
    assert given.grad is not None
