"""quanto-int8-cpu-kernel: int8 weights crash the process or give garbage on CPUs with AVX."""

from __future__ import annotations

import faulthandler
import functools
import os

import pytest

from tests.fixes import quanto_models as q

FIX_ID = "quanto-int8-cpu-kernel"


@functools.cache
def capability() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability()


@pytest.mark.defect(FIX_ID, shows=r"the process ended with -11|the process ended with -7")
def test_rows_of_any_length():
    q.quanto()
    if "AVX" not in capability():
        pytest.skip(f"the kernel of this CPU ({capability()}) reads single weights")
    # In a forked process, since the kernel crashes.
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            faulthandler.disable()  # it may crash
            os.write(writer, str(four_rows_of_68_weights()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        off = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"the process ended with {code}"
    assert float(off) < q.TOLERANCE["int8"]


def four_rows_of_68_weights() -> float:
    import torch

    output = q.run(q.layers("qint8", torch.bfloat16, 68), torch.bfloat16, 68, 4)
    return q.error(output, q.run(q.plain_layers(None, 68), None, 68, 4))


@pytest.mark.defect(FIX_ID, shows=r"off by (nan|inf|[0-9.e+]+) of the greatest output")
def test_one_row_is_no_garbage():
    """No crash here, but numbers from behind the weight."""
    import torch

    if capability() != "AVX512":
        pytest.skip(f"the kernel of this CPU ({capability()}) reads one row without garbage")
    for width in (20, 40, 68, 72, 1000):
        model = q.layers("qint8", torch.bfloat16, width)
        off = q.error(
            q.run(model, torch.bfloat16, width, 1), q.run(q.plain_layers(None, width), None, width, 1)
        )
        assert off < q.TOLERANCE["int8"], f"width {width}: off by {off} of the greatest output"


@pytest.fixture
def kernel(monkeypatch):
    """quanto's function over a stand-in for torch's kernel, that asks for what the kernel of AVX512 needs."""
    import torch

    q.quanto()
    from optimum.quanto.library import qbytes_mm

    def strict(activations, weights, scales):
        calls.append((activations, weights))
        assert weights.shape[-1] % 16 == 0 and weights.data_ptr() % 16 == 0
        assert activations.shape[-1] == weights.shape[-1]
        return ((activations.float() @ weights.float().t()) * scales.float()).to(activations.dtype)

    calls = []
    monkeypatch.setattr(torch, "_weight_int8pack_mm", strict)
    strict.calls = calls
    strict.function = qbytes_mm.qbytes_int8pack_mm
    return strict


@pytest.mark.parametrize("offset", [0, 1, 4, 8, 16])
@pytest.mark.parametrize("width", [4, 16, 20, 64, 68, 72, 100, 256])
@pytest.mark.parametrize("shape", [(1,), (2,), (5,), (2, 3)])
def test_the_kernel_gets_what_it_needs(kernel, width, offset, shape):
    """On every CPU: any width, any offset within a file, two and three dimensions."""
    import torch

    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(-127, 127, (offset + 32 * width,), generator=generator, dtype=torch.int8)
    weights = memory[offset:].view(32, width)
    activations = torch.randn(*shape, width, generator=generator).to(torch.bfloat16)
    scales = torch.rand(32, 1, generator=generator).to(torch.bfloat16)
    output = kernel.function(activations, weights, scales)
    expected = (activations.float() @ weights.float().t()) * scales.float().t()
    assert output.shape == (*shape, 32)
    assert q.error(output, expected) < 0.01


@pytest.mark.parametrize("width", [20, 64])
@pytest.mark.parametrize("shape", [(5,), (2, 5)])
def test_transposed_activations(kernel, width, shape):
    import torch

    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-127, 127, (32, width), generator=generator, dtype=torch.int8)
    activations = torch.randn(*shape[:-1], width, shape[-1], generator=generator).bfloat16().transpose(-1, -2)
    scales = torch.rand(32, 1, generator=generator).bfloat16()
    expected = kernel.function(activations.contiguous(), weights, scales)
    assert torch.equal(kernel.function(activations, weights, scales), expected)
    assert kernel.calls[-1][0].stride(-1) == 1


@pytest.mark.defect(FIX_ID, shows=r"(A must|expect A to) be contiguous|the process ended with -")
def test_a_transposed_input_of_a_layer():
    """A quantized layer takes what a plain one takes: torch's own kernel."""
    import torch

    q.quanto()
    if not hasattr(torch.ops.aten, "_weight_int8pack_mm"):
        pytest.skip("this torch has no such kernel")
    width = 64
    model = q.layers("qint8", torch.bfloat16, width)
    inputs = torch.randn(width, 5, generator=torch.Generator().manual_seed(0)).bfloat16().t()
    with torch.no_grad():
        assert torch.equal(model(inputs), model(inputs.contiguous()))


def test_what_the_kernel_can_take_is_not_copied(kernel):
    import torch

    weights = torch.zeros(32, 64, dtype=torch.int8)
    activations = torch.zeros(4, 64, dtype=torch.bfloat16)
    kernel.function(activations, weights, torch.ones(32, 1, dtype=torch.bfloat16))
    ((given, held),) = kernel.calls
    assert given is activations and held is weights
