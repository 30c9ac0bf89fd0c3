"""What `release` costs: against one collection of the same heap, and how it grows with the number of layers."""

from __future__ import annotations

from collections.abc import Iterator

from .figure import Row, figure
from .measure import child


@figure("release")
def releasing() -> Iterator[Row]:
    """A heap of millions of objects, with and without a survivor; models of thousands of layers."""
    said = child("releasing:large_heap")
    detail = f"{said['objects'] / 1e6:.1f} million objects, one collection {said['collect']:.2f} s"
    yield Row(
        "release in a large heap / one garbage collection of it",
        said["plain"] / said["collect"],
        goal=1.2,
        detail=detail,
    )
    what = "release in a large heap with a survivor / one garbage collection of it"
    yield Row(what, said["survivor"] / said["collect"], goal=2.5, detail=f"{said['survivor']:.2f} s")
    seconds = {count: child("releasing:layers", count) for count in (5_000, 20_000, 80_000)}
    for few, many in ((5_000, 20_000), (20_000, 80_000)):
        detail = f"{seconds[many]:.2f} s / {seconds[few]:.2f} s"
        what = f"release of {many:,} layers / of {few:,} layers"
        yield Row(what, seconds[many] / seconds[few], goal=5.0, detail=detail)


def large_heap() -> dict:
    """Processor seconds of a collection and of two releases among 5 million objects and 200,000 tensors."""
    import gc
    import time

    import torch

    import diffusers_quantfix as qf

    gc.disable()
    heap = [[{"k": [number], "x": (number, [number])}] for number in range(1_000_000)]
    tensors = [torch.zeros(4) for _ in range(200_000)]
    gc.enable()

    def seconds(call) -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    def model():
        return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(10)])

    first, second, other = model(), model(), torch.nn.Linear(4, 4)
    other.weight = second[3].weight
    said = {"objects": len(gc.get_objects()), "collect": seconds(gc.collect)}
    said["plain"] = seconds(lambda: qf.release(first))
    said["survivor"] = seconds(lambda: qf.release(second))
    del heap, tensors
    return said


def layers(count: int) -> float:
    """Processor seconds of the release of a model of ``count`` layers.

    Without Python's own garbage collection, which searches the whole heap once more whenever it has grown by a quarter:
    a second of five with 80,000 layers, and nothing with fewer.
    """
    import gc
    import time

    import torch

    import diffusers_quantfix as qf

    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(count)])
    gc.collect()
    gc.disable()
    began = time.process_time()
    qf.release(model)
    return time.process_time() - began
