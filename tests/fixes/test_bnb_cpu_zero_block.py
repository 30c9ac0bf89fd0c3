"""bnb-cpu-zero-block: quantizing a block of zeros on the CPU crashes the process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import diffusers_quantfix

ROOT = Path(__file__).resolve().parents[2]
FIX_ID = "bnb-cpu-zero-block"
SHOWS = r"the process ended with -(11|7)"


def functional():
    """The functions of bitsandbytes, where its native library is installed."""
    pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes.functional")
    lib = functional.lib
    if lib is None or type(lib).__name__ == "ErrorHandlerMockBNBNativeLibrary":
        pytest.skip("bitsandbytes has no native library here")
    return functional


@pytest.fixture(scope="module")
def in_a_process():
    """A function that calls one of this module's in another process, since the kernel crashes: what it returns, or the
    last line of its error.

    One process for all calls as long as it lives: its imports take longer than they. A new one, not a forked one, which
    waits for ever for threads of OpenMP that earlier tests have used.
    """
    program = (
        f"import diffusers_quantfix\nfrom tests.fixes import {Path(__file__).stem} as here\nhere.serve()"
    )
    started: list[subprocess.Popen[str]] = []

    def call(function, *arguments) -> str:
        if not started or started[-1].poll() is not None:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", program],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        process = started[-1]
        print(json.dumps([function.__name__, arguments]), file=process.stdin, flush=True)
        for line in process.stdout:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER).strip()
        raise AssertionError(f"the process ended with {process.wait()}")

    yield call
    for process in started:
        process.stdin.close()
        process.stdout.close()
        process.wait(60)


ANSWER = "answer: "


def serve() -> None:
    """Answer the calls of the fixture ``in_a_process``, one in each line of standard input."""
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            said = globals()[name](*arguments)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(ANSWER + said, flush=True)


def values(count: int = 1024):
    import torch

    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def round_trip(given, size: int):
    """(indices, scales, the values again)."""
    f = functional()
    indices, state = f.quantize_blockwise(given, blocksize=size)
    return indices, state.absmax, f.dequantize_blockwise(indices, state)


def zeros_stay(count: int, start: int, end: int, zero: float) -> str:
    import torch

    given = values(count)
    given[start:end] = zero
    before = given.clone()
    again = round_trip(given, 256)[2]
    assert torch.equal(given, before), "the input was changed"
    rest = torch.ones(count, dtype=torch.bool)
    rest[start:end] = False
    assert not again[~rest].any()
    assert torch.allclose(again[rest], given[rest], atol=0.1)
    return "right"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize(
    ("count", "start", "end"),
    [(1024, 256, 512), (1024, 0, 1024), (1000, 768, 1000), (100, 0, 100)],
    ids=["one-block", "all", "the-last-and-shorter", "shorter-than-a-block"],
)
def test_a_block_of_zeros_stays_zero(in_a_process, count, start, end, zero):
    functional()
    assert in_a_process(zeros_stay, count, start, end, zero) == "right"


def runs_in_four_bits(value: float, kind: str) -> str:
    import torch
    from bitsandbytes import nn

    layer = nn.Linear4bit(64, 64, quant_type=kind, compress_statistics=True)
    with torch.no_grad():
        layer.weight.fill_(value)
        layer.bias.zero_()
    layer.to("cpu")
    output = layer(torch.ones(2, 64))
    assert torch.equal(output, torch.full((2, 64), 64 * value)), output
    return "right"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("value", [0.0, 1.0], ids=["zeros", "ones"])
def test_a_four_bit_layer_whose_blocks_share_a_scale(in_a_process, value, kind):
    """Double quantization, as diffusers documents it, of a layer that was initialized with zeros."""
    import torch

    functional()
    if not hasattr(torch.ops.bitsandbytes, "quantize_4bit"):
        pytest.skip("this release quantizes to 4 bits on GPUs only")
    pytest.importorskip("bitsandbytes.nn")
    said = in_a_process(runs_in_four_bits, value, kind)
    if "NotImplementedError" in said or "quantize_4bit" in said:
        pytest.skip(f"this release quantizes to 4 bits on GPUs only: {said}")
    if "must be nf4 on CPU" in said:
        pytest.skip("this release has one 4-bit kind on the CPU")
    assert said == "right"


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_what_has_no_scale_is_refused(bad):
    """NaN and infinity crash the same kernel; nothing can be right for them."""
    f = functional()
    if diffusers_quantfix.status()[FIX_ID].state != "applied":
        pytest.skip("the kernel of this release takes them")
    given = values()
    given[300] = float(bad)
    with pytest.raises(ValueError, match="cannot quantize NaN or infinity on the CPU: block 1 of 4"):
        f.quantize_blockwise(given, blocksize=256)
    again = round_trip(values(), 256)[2]  # and then as before
    assert abs(again - values()).max() < 0.1


@pytest.mark.long
def test_what_the_kernel_can_take_is_as_it_was():
    """Bit for bit what the library gives without the patch, and what it gives beside a block of zeros."""
    import torch

    f = functional()
    patched = round_trip(values(1000), 256)
    with_zeros = values(1000)
    with_zeros[256:512] = 0
    indices, scales, _ = round_trip(with_zeros, 256)
    kept = torch.ones(1000, dtype=torch.bool)
    kept[256:512] = False
    assert torch.equal(indices[kept], patched[0][kept])
    assert torch.equal(scales[[0, 2, 3]], patched[1][[0, 2, 3]]) and scales[1] == 0
    diffusers_quantfix.revert(FIX_ID)
    try:
        assert "quantize_blockwise" not in str(vars(f.lib).get("cquantize_blockwise_cpu_fp32"))
        bare = round_trip(values(1000), 256)
    finally:
        diffusers_quantfix.apply(FIX_ID)
    for one, other in zip(patched, bare, strict=True):
        assert torch.equal(one, other)


@pytest.mark.long
def test_in_threads_and_under_another_default_device():
    import torch

    functional()
    found = []

    def work():
        given = values(2048)
        given[512:1024] = 0
        with torch.device("meta"):
            inner = given.clone()
        with torch.inference_mode():
            found.append(round_trip(inner, 256)[2])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(torch.equal(one, found[0]) for one in found)
    assert not found[0][512:1024].any()
