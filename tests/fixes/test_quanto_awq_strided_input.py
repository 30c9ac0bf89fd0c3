"""quanto-awq-strided-input: int4 weights of quanto give a wrong output where the input is not contiguous."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_kernels
from tests.fixes import quanto_models as q

# Before the devices of the rig are there: quanto looks for GPUs when it is imported.
pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed", exc_type=ImportError)

FIX_ID = "quanto-awq-strided-input"


@pytest.fixture
def model(gpu, monkeypatch):
    """A model with weights that are packed for AWQ, and a kernel that reads as upstream's (gemm_cuda.cu, gemv_cuda.cu):
    from the address of the input on, row after row."""
    import torch

    quanto_kernels.capable(monkeypatch)
    model = q.layers("qint4", torch.float16).to(gpu.devices[0]).requires_grad_(False)
    assert type(model[0].weight).__name__ == "AWQWeightQBitsTensor"
    if gpu.kind == "rig":
        honest = torch.ops.quanto.gemm_f16i4_awq

        def kernel(input, *args, **sizes):
            size = tuple(input.shape)
            rows = torch.as_strided(input, size, torch.empty(size, device="meta").stride())
            return honest(rows, *args, **sizes)

        monkeypatch.setattr(torch.ops.quanto, "gemm_f16i4_awq", kernel)
    return model


def strided(how: str, device):
    """An input of 24 rows, or of 6, that is not contiguous; fewer than 8 rows are for another kernel."""
    import torch

    whole = q.inputs(torch.float16, rows=24, device=device)
    if how == "transposed":
        return whole.view(4, 6, 256).transpose(0, 1)
    if how == "sliced":
        return whole.view(4, 6, 256)[:, 2:]
    if how == "few rows":
        return whole.view(2, 12, 256)[:, 9:]
    return whole.repeat(1, 2)[:, ::2]


@pytest.mark.parametrize("how", ["transposed", "sliced", "few rows", "columns"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.defect("quanto-awq-strided-input", shows="other numbers")
def test_the_output_is_that_of_a_contiguous_input(model, gpu, how, bias):
    import torch

    given, layer = strided(how, gpu.devices[0]), model[0]
    assert not given.is_contiguous()
    with torch.no_grad():
        output, expected = (
            torch.nn.functional.linear(one, layer.weight, layer.bias if bias else None)
            for one in (given, given.contiguous())
        )
        assert torch.equal(output, expected), f"other numbers: off by {q.error(output, expected)}"


@pytest.mark.defect("quanto-awq-strided-input", shows="other numbers")
def test_the_gradient_of_the_input(model, gpu):
    """Through two frozen layers: with a wrong output of the first one, that of the loss is another."""
    gradients = []
    for whole in (False, True):
        given = strided("sliced", gpu.devices[0]).detach()
        given = (given.contiguous() if whole else given).requires_grad_(True)
        model(given).float().pow(2).sum().backward()
        gradients.append(given.grad)
    off = q.error(*gradients)
    assert off < 0.01, f"other numbers: off by {off}"


def test_what_is_saved_is_the_input(model, gpu):
    """No copy of it is kept for the backward pass."""
    for given in (q.inputs(model[0].bias.dtype, device=gpu.devices[0]), strided("sliced", gpu.devices[0])):
        q.assert_saves_no_copy(model[0], given)
