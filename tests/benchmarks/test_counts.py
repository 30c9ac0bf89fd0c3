"""The counts behind the figures, asserted: times never are."""

from __future__ import annotations

import pytest

import diffusers_quantfix as qf
from tests.benchmarks import calls, newer, offloading
from tests.benchmarks.figure import Row
from tests.benchmarks.measure import child, children
from tests.gate import unmet

# Kind of a layer -> the frames of ours in one onload and offload of its group.
MOVES = {4: 118, 8: 108, "GGUF": 82, "quanto": 76, "torchao": 73}


@pytest.mark.parametrize("bits", [4, 8])
def test_a_forward_pass_has_no_frame_of_ours(bits):
    if reason := unmet("bitsandbytes>=0.46"):
        pytest.skip(f"quantizing on the CPU: {reason}")
    import torch

    state = {fix.id: fix.state for fix in qf.status()}
    with torch.no_grad():
        model, inputs = calls._model(bits)
        model(inputs)
        # bnb-cpu-packing has to ask each weight that is repacked, which CPUs with AVX512-BF16 do
        allowed = len(model) if bits == 4 and state["bnb-cpu-packing"] == "applied" else 0
        assert calls.our_frames(lambda: model(inputs)) == allowed


def test_a_forward_pass_on_a_gpu_has_no_frame_of_ours():
    if reason := unmet("bitsandbytes>=0.50"):
        pytest.skip(f"before, 4-bit weights go through dequantize_4bit there: {reason}")
    assert children([("calls:frames_on_a_gpu", bits) for bits in (4, 8)]) == [{"frames": 0}] * 2


@pytest.mark.parametrize(("kind", "most"), MOVES.items())
def test_the_moves_of_a_group_of_one_layer(gpu, kind, most):
    """They are Python for the most part, and one frame of ours more is one percent of their time. Between the 23rd and
    the 29th of November they became a sixth slower, and nobody noticed."""
    import torch

    for release in ("diffusers>=0.42", "bitsandbytes>=0.50", "torchao>=0.17"):
        if reason := unmet(release):
            pytest.skip(reason)
    with torch.no_grad():
        layers = torch.nn.Sequential(*offloading._layers(kind, 1))
        group = offloading._group(layers, gpu.devices[0])
        for _ in range(3):
            group.onload_()
            group.offload_()
        assert calls.our_frames(group.onload_) + calls.our_frames(group.offload_) <= most


@pytest.mark.long
@pytest.mark.parametrize("bits", [4, 8])
def test_torch_compile_sees_the_same_graphs(bits):
    with_us, without = (children([("compiling:graphs", bits)], package=side) for side in (True, False))
    assert with_us == without


@pytest.mark.long
def test_code_is_compared_only_above_a_claim():
    """In claimed releases nothing is called or read for it; with newer numbers the same is counted."""
    within = child("newer:decide", True)
    assert (within["calls"], within["files"]) == (0, 0)
    assert within["applied"] > 100
    above = newer.above(True)
    assert above["calls"] > 1000 and above["files"] > 50
    assert above["by code"] > 100


def test_our_frames_are_counted():
    from diffusers_quantfix.engine.versions import contains

    assert calls.our_frames(lambda: None) == 0
    assert calls.our_frames(lambda: contains(">=1.0", "1.0")) > 0


@pytest.mark.parametrize(
    ("value", "goal", "exact", "verdict"),
    [(1.0, 1.1, False, "yes"), (1.2, 1.1, False, "no"), (0.0, 0.0, True, "yes"), (1.0, 0.0, True, "no"),
     (-2.0, 1.0, False, "yes"), (1.0, None, False, ""), (None, 1.0, False, "")],
)  # fmt: skip
def test_the_verdict_of_a_row(value, goal, exact, verdict):
    assert Row("what", value, goal=goal, exact=exact).verdict == verdict
