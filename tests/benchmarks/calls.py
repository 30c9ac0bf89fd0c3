"""What a forward pass and a call that moves nothing cost more with the package than without."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

from .figure import Row, figure
from .measure import Failed, child

PROCESSES = 3
ROUNDS = 40


@figure("forward")
def forward() -> Iterator[Row]:
    """The forward pass of a quantized model that is not offloaded."""
    for bits in (4, 8):
        said = [child("calls:forward_seconds", bits) for _ in range(PROCESSES)]
        one, other = _median(said, "with"), _median(said, "without")
        yield Row(
            f"forward of a {bits}-bit model that is not offloaded, with / without",
            statistics.median(found["with"] / found["without"] for found in said), goal=1.02,
            detail=f"{1000 * one:.2f} ms / {1000 * other:.2f} ms",
        )  # fmt: skip
        frames = max(found["frames"] for found in said)
        yield Row(f"  our frames in it, {bits}-bit, on the CPU", frames, "", 0, exact=True)
        frames = child("calls:frames_on_a_gpu", bits)["frames"]
        yield Row(f"  our frames in it, {bits}-bit, on a GPU", frames, "", 0, exact=True)


def forward_seconds(bits: int) -> dict:
    """The fastest of many forward passes, in processor seconds, and how many frames of ours one has."""
    model, inputs = _model(bits)
    model(inputs)
    taken = both_sides({"forward": (lambda: model(inputs), 20)})["forward"]
    return taken | {"frames": our_frames(lambda: model(inputs))}


def both_sides(calls: dict[str, tuple[Callable[[], object], int]]) -> dict[str, dict[str, float]]:
    """Processor seconds of each call with the package and without, in turns, in this one process.

    One process: how it lies in memory is the same for both sides, and the libraries are imported once. `revert` puts
    upstream's own functions back.

    Args:
        calls: by name, a call and how many times it is made each round.

    Returns:
        By name, the fastest round of "with" and of "without".

    Raises:
        Failed: the patches were not removed, or not installed again.
    """
    import diffusers_quantfix as qf

    taken: dict[str, dict[str, list[float]]] = {name: {"with": [], "without": []} for name in calls}
    for turn in range(ROUNDS + 1):
        for side in ("with", "without") if turn % 2 else ("without", "with"):
            board = qf.apply() if side == "with" else qf.revert()
            if any(fix.state == "applied" for fix in board) != (side == "with"):
                raise Failed("the patches were not removed, or not installed again")
            for name, (call, times) in calls.items():
                call()
                seconds = _timed(call, times)
                # The first round warms both up.
                if turn:
                    taken[name][side].append(seconds)
    qf.apply()
    return {name: {side: min(found) for side, found in sides.items()} for name, sides in taken.items()}


def _median(said: list[dict[str, float]], name: str) -> float:
    return statistics.median(found[name] for found in said)


def frames_on_a_gpu(bits: int) -> dict:
    """How many frames of ours a forward pass has where no quantized weight has been used on the CPU."""
    from .memory import _devices

    stack, gpu = _devices()
    with stack:
        here = gpu.devices[0]
        model, inputs = _model(bits, here)
        inputs = inputs.to(here)
        model(inputs)
        # The stand-in for a GPU computes with kernels of the CPU, which a GPU does not call.
        return {"frames": our_frames(lambda: model(inputs), but=("cpu_avx512_scales.py",))}


def our_frames(call: Callable[[], object], but: tuple[str, ...] = ()) -> int:
    """How many Python frames of this package a call enters, without those of the files ``but``."""
    import diffusers_quantfix

    folder = diffusers_quantfix.__file__.rpartition("/")[0]
    seen = 0

    def profile(frame, event, argument):
        nonlocal seen
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(folder) and not file.endswith(but):
            seen += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@figure("calls")
def calls() -> Iterator[Row]:
    """`Params4bit.to` and `Linear8bitLt._apply` with nothing to move, and what other ways to patch would cost."""
    found = [child("calls:call_seconds") for _ in range(PROCESSES)]
    for name, what in (("to", "Params4bit.to"), ("apply", "Linear8bitLt._apply")):
        said = [one[name] for one in found]
        yield Row(
            f"{what} with nothing to move: added per call",
            1e6 * statistics.median(one["with"] - one["without"] for one in said), "us", 1.0,
            detail=f"{1e6 * _median(said, 'with'):.2f} us / {1e6 * _median(said, 'without'):.2f} us",
        )  # fmt: skip
    peers = child("calls:peer_seconds", package=False)
    for name, seconds in peers.items():
        yield Row(f"  peer: {name}: added per call", 1e6 * seconds, "us")


def call_seconds() -> dict:
    """Seconds of one call of each kind, on a device, nothing moving, by the side."""
    from .memory import _devices

    stack, gpu = _devices()
    with stack:
        here = gpu.devices[0]
        weight, layer = _layer(4, here).weight, _layer(8, here)

        def to_where_it_is(tensor):  # what module.to(device) does with each tensor
            return tensor.to(here, None, False)

        return both_sides(
            {"to": (lambda: weight.to(here), 2000), "apply": (lambda: layer._apply(to_where_it_is), 500)}
        )


def _moving(item) -> Callable[[], object]:
    return lambda: item.to("cpu")


def peer_seconds() -> dict:
    """What a call costs more through a hand-pasted closure and through wrapt's FunctionWrapper."""
    import wrapt

    class Plain:
        def to(self, device):
            return self

    class Pasted(Plain):
        pass

    class Wrapped(Plain):
        pass

    original = Plain.to

    def pasted(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    Pasted.to = pasted
    Wrapped.to = wrapt.FunctionWrapper(
        original, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs)
    )
    kinds = (Plain, Pasted, Wrapped)
    plain, closure, wrapper = [min(_timed(_moving(kind()), 20000) for _ in range(ROUNDS)) for kind in kinds]
    return {"a hand-pasted closure": closure - plain, "wrapt.FunctionWrapper": wrapper - plain}


def _timed(call: Callable[[], object], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) / times


def _layer(bits: int, device):
    """A quantized layer on ``device``, quantized by bitsandbytes itself on its way there."""
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    if bits == 4:
        return Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to(device)
    return Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0).to(device)


def _model(bits: int, device="cpu"):
    """Four quantized layers, and inputs for them on the CPU."""
    import torch

    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    return torch.nn.Sequential(*(_layer(bits, device) for _ in range(4))).eval(), torch.randn(8, 64)
