"""What `track`, its picture and `audit` cost, on models with many layers and in runs of many calls."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .figure import Row, figure
from .measure import child

ROUNDS = 9
SIZES = (5_000, 20_000, 80_000)


@figure("tools")
def tools() -> Iterator[Row]:
    """`track` with / without, and how `audit` and the picture grow."""
    for what, layers, calls in (
        ("`track`, 10,000 calls of a tiny component", 2, 10_000),
        ("`track`, 500 layers x 50 steps", 500, 50),
        ("`track`, one forward pass of 20,000 layers", 20_000, 1),
    ):
        said = child("tools:tracked", layers, calls)
        yield Row(
            f"{what}, with / without", said["with"] / said["without"], goal=1.2,
            detail=f"{said['with']:.2f} s / {said['without']:.2f} s, {said['samples']} samples",
        )  # fmt: skip
    yield Row("  samples kept of 10,000 calls with interval=0", child("tools:kept", 10_000), "", 1000)
    said = child("tools:audited")
    for small, large in ((5_000, 20_000), (20_000, 80_000)):
        per_layer = said[str(large)] / said[str(small)] / (large / small)
        yield Row(
            f"`audit` of {large:,} layers / of {small:,}, per layer", per_layer, goal=1.25,
            detail=f"{said[str(large)]:.2f} s / {said[str(small)]:.2f} s",
        )  # fmt: skip
    said = child("tools:drawn")
    yield Row(
        "picture of 20,000 samples / of 1,000", said["20000"] / said["1000"], goal=1.5,
        detail=f"{said['20000']:.2f} s / {said['1000']:.2f} s",
    )  # fmt: skip


def tracked(layers: int, calls: int) -> dict:
    """Processor seconds of calls of a model, with `track` and without."""
    import diffusers_quantfix as qf

    model, inputs = _model(layers)
    memory = None

    def run() -> None:
        for _ in range(calls):
            model(inputs)

    def watched() -> None:
        nonlocal memory
        with qf.track(model) as memory:
            run()

    ways = {"with": watched, "without": run}
    run()
    rounds = [{name: _seconds(way) for name, way in ways.items()} for _ in range(ROUNDS)]
    best = {name: min(one[name] for one in rounds) for name in ways}
    return {**best, "samples": len(memory.samples)}


def kept(calls: int) -> int:
    """How many samples of so many calls stay, when every call is sampled."""
    import diffusers_quantfix as qf

    model, inputs = _model(2)
    with qf.track(model, interval=0) as memory:
        for _ in range(calls):
            model(inputs)
    return len(memory.samples)


def audited() -> dict:
    """Processor seconds of `audit` by the number of layers, in turn."""
    import diffusers_quantfix as qf

    models = {size: _model(size)[0] for size in SIZES}
    qf.audit(models[SIZES[0]])
    taken: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(ROUNDS):
        for size, model in models.items():
            taken[size].append(_seconds(lambda model=model: qf.audit(model)))
    return {str(size): min(seconds) for size, seconds in taken.items()}


def drawn() -> dict:
    """Processor seconds of the picture by the number of samples."""
    from diffusers_quantfix.memory import Sample
    from diffusers_quantfix.memory.plot import plot

    samples = []
    for index in range(20_000):
        held = {"cuda:0": 1000 + index * 7919 % 1000}
        label = f"transformer {'ends' if index % 2 else 'begins'}"
        samples.append(Sample(float(index), label, held, {"cuda:0": 3000}, {"transformer": held}))
    taken = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        path = Path(folder) / "memory.png"
        plot({"run": samples[:10]}, path)
        for count in (1_000, 20_000):
            taken[str(count)] = min(
                _seconds(lambda count=count: plot({"run": samples[:count]}, path)) for _ in range(ROUNDS)
            )
    return taken


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _model(layers: int):
    import torch

    torch.set_grad_enabled(False)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers))), torch.randn(16, 64)
