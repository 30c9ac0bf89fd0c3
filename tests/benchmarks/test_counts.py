"""The counts behind the figures, asserted: times never are."""

from __future__ import annotations

import pytest

import diffusers_quantfix as qf
from tests.benchmarks import calls
from tests.benchmarks.figure import Row
from tests.gate import unmet
from tests.rig.frames import our_frames


@pytest.mark.parametrize("bits", [4, 8])
def test_a_forward_pass_has_no_frame_of_ours(bits):
    if reason := unmet("bitsandbytes>=0.46"):
        pytest.skip(f"quantizing on the CPU: {reason}")
    import torch

    state = {fix.id: fix.state for fix in qf.status()}
    with torch.no_grad():
        model, inputs = calls._model(bits)
        model(inputs)
        # bnb-cpu-packing stands at the kernel for repacked weights, which CPUs with AVX512-BF16 have
        allowed = len(model) if bits == 4 and state["bnb-cpu-packing"] == "applied" else 0
        assert our_frames(lambda: model(inputs)) == allowed


@pytest.mark.parametrize("bits", [4, 8])
def test_a_forward_pass_on_a_gpu_has_no_frame_of_ours(gpu, bits):
    if reason := unmet("bitsandbytes>=0.50"):
        pytest.skip(f"before, 4-bit weights go through dequantize_4bit there: {reason}")
    import torch

    here = gpu.devices[0]
    with torch.no_grad():
        model, inputs = calls._model(bits)
        model.to(here)
        inputs = inputs.to(here)
        model(inputs)
        assert our_frames(lambda: model(inputs)) == 0


def test_our_frames_are_counted():
    from diffusers_quantfix.engine.versions import contains

    assert our_frames(lambda: None) == 0
    assert our_frames(lambda: contains(">=1.0", "1.0")) > 0


@pytest.mark.parametrize(
    ("value", "goal", "exact", "verdict"),
    [(1.0, 1.1, False, "yes"), (1.2, 1.1, False, "no"), (0.0, 0.0, True, "yes"), (1.0, 0.0, True, "no"),
     (-2.0, 1.0, False, "yes"), (1.0, None, False, ""), (None, 1.0, False, "")],
)  # fmt: skip
def test_the_verdict_of_a_row(value, goal, exact, verdict):
    assert Row("what", value, goal=goal, exact=exact).verdict == verdict
