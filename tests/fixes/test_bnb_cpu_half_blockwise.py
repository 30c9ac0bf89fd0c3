"""bnb-cpu-half-blockwise: block-wise quantization on the CPU reads numbers of 16 bits as such of 32."""

from __future__ import annotations

import pytest

from tests.gate import unmet

torch = pytest.importorskip("torch")
functional = pytest.importorskip("bitsandbytes.functional")

if getattr(functional, "lib", True) is None:
    pytest.skip("this bitsandbytes loads no kernels where torch has no CUDA", allow_module_level=True)

FIX_ID = "bnb-cpu-half-blockwise"
NUMBERS = 8
# From 0.46.0 on no tensor on the CPU can be given as ``out``.
with_out = pytest.mark.skipif(
    not unmet("bitsandbytes>=0.46"), reason="bitsandbytes 0.46 takes no out on the CPU"
)
# Since 0.47.0 upstream computes it, 0.46 raises an error.
computes = pytest.mark.skipif(
    not unmet("bitsandbytes>=0.46") and bool(unmet("bitsandbytes>=0.47")),
    reason="bitsandbytes 0.46 raises an error",
)
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def some(dtype, numbers: int = NUMBERS):
    """The first of more numbers, of which each pair, read as one of float32, is one between 0.5 and 2, too: the kernel
    reads behind them, and may end the process where it finds NaN or very great ones.
    """
    generator = torch.Generator().manual_seed(0)
    bits = 0x3F00 + torch.randint(256, (4 * numbers,), generator=generator)
    bits += torch.randint(2, (4 * numbers,), generator=generator) * -0x8000
    return bits.to(torch.int16).view(dtype if dtype.itemsize == 2 else torch.bfloat16).to(dtype)[:numbers]


@computes
@dtypes
@pytest.mark.defect(FIX_ID, shows="other codes")
def test_the_codes_are_those_of_the_same_numbers_in_float32(dtype):
    given = some(dtype)
    codes, state = functional.quantize_blockwise(given)
    expected, reference = functional.quantize_blockwise(given.float())
    assert torch.equal(codes, expected) and torch.equal(state.absmax.float(), reference.absmax), "other codes"
    assert state.dtype == dtype


@with_out
@dtypes
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.defect(FIX_ID, shows="other numbers")
def test_what_is_dequantized_is_that_of_float32_in_that_dtype(dtype, keyword):
    codes, state = functional.quantize_blockwise(some(torch.float32))
    expected = functional.dequantize_blockwise(codes, state).to(dtype)
    memory = torch.zeros(4 * NUMBERS, dtype=dtype)
    out = memory[:NUMBERS]
    state.dtype = dtype
    if keyword:
        found = functional.dequantize_blockwise(codes, quant_state=state, out=out)
    else:
        found = functional.dequantize_blockwise(codes, state, None, None, out)
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(out, expected), "other numbers"
    assert not memory[NUMBERS:].any(), "other numbers: those behind the tensor"


@computes
@dtypes
@pytest.mark.parametrize("nested", [False, True])
def test_there_and_back(dtype, nested):
    """Large enough to crash without us; also with scales that are quantized."""
    given = some(dtype, 40_000).view(200, 200)
    codes, state = functional.quantize_blockwise(given, blocksize=256, nested=nested)
    found = functional.dequantize_blockwise(codes, state)
    assert found.dtype == dtype and found.shape == given.shape
    assert (found.float() - given.float()).abs().max() < 0.1


def test_float32_is_what_it_was():
    given = some(torch.float32, 10_000)
    codes, state = functional.quantize_blockwise(given)
    assert state.dtype == torch.float32
    assert (functional.dequantize_blockwise(codes, state) - given).abs().max() < 0.1


@pytest.mark.defect(FIX_ID, shows="other scales", needs="bitsandbytes<0.45.4")
def test_nested_scales_in_float32():
    given = some(torch.float32, 1000)
    codes, state = functional.quantize_blockwise(given, blocksize=256, nested=True)
    found = functional.dequantize_blockwise(codes, state)
    assert torch.allclose(found, given, atol=0.1), "other scales"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_other_types_are_refused(dtype):
    if not unmet("bitsandbytes>=0.46"):
        pytest.skip("bitsandbytes 0.46 answers in its own way")
    codes, state = functional.quantize_blockwise(some(torch.float32))
    with pytest.raises(ValueError, match="only supports 16/32-bit floats"):
        functional.quantize_blockwise(some(torch.float32).to(dtype))
    with pytest.raises(ValueError, match="only supports 16/32-bit floats"):
        functional.dequantize_blockwise(codes, state, out=torch.zeros(NUMBERS, dtype=dtype))


def test_without_a_state():
    """By scales and code alone: the result is float32."""
    codes, state = functional.quantize_blockwise(some(torch.float32))
    found = functional.dequantize_blockwise(codes, absmax=state.absmax, code=state.code)
    assert torch.equal(found, functional.dequantize_blockwise(codes, state))
