"""How users call it: the three spellings of a device, a run that ends in the middle, inference mode."""

from __future__ import annotations

import itertools
import sys

import pytest

from tests.marks import rest_is_long

INDEX, NO_INDEX, TEXT = "cuda:0", "cuda", "text"
_says = {"spelling": INDEX}


@pytest.fixture(autouse=True, params=rest_is_long([INDEX, NO_INDEX], NO_INDEX))
def spelling(request, monkeypatch):
    """Every test of a module that imports this runs as upstream's documentation writes a device,
    ``torch.device("cuda")``, and, with the long tests, with its index."""
    monkeypatch.setitem(_says, "spelling", request.param)


@pytest.fixture(params=[NO_INDEX, TEXT])
def without_index(request, monkeypatch):
    """A test that uses this says ``torch.device("cuda")``, and ``"cuda"``."""
    monkeypatch.setitem(_says, "spelling", request.param)


@pytest.fixture(params=rest_is_long([INDEX, NO_INDEX, TEXT], NO_INDEX))
def each_spelling(request, monkeypatch):
    """A test that uses this runs once for each spelling of the device."""
    monkeypatch.setitem(_says, "spelling", request.param)


def spelled(device):
    """``device`` as the test says it; without an index it is the current device from then on."""
    import torch

    device = torch.device(device)
    if _says["spelling"] == INDEX or device.type == "cpu":
        return device
    torch.cuda.set_device(device)
    return device.type if _says["spelling"] == TEXT else torch.device(device.type)


class Interrupted(Exception):
    """Raised in the middle of a pass, as Ctrl-C and a lack of memory are."""


def interrupt(run, part: float) -> None:
    """Call ``run()`` and raise at ``part`` of its operations, copies between devices among them.

    It is called once before, to count them.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self, last: int):
            super().__init__()
            self.seen, self.last = 0, last

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            # On CUDA the device and the stream are set by no operator, in the rig by its own: ``with`` puts them back.
            if func.namespace != "diffusers_quantfix_rig":
                self.seen += 1
                if self.seen == self.last:
                    raise Interrupted
            return func(*args, **(kwargs or {}))

    with Count(0) as count:
        run()
    last = max(1, int(part * count.seen))
    # Not always Interrupted: safetensors raises an error of its own in its place.
    with pytest.raises(Exception), Count(last) as count:  # noqa: B017
        run()
    assert count.seen == last, "it was raised, and nothing ran after it"


def stopped_at_each_line(prepare, work, *places):
    """Yield what ``prepare()`` gives after Ctrl-C in ``work(it)``: at its first line in ``places``, its second...

    Places are modules, or functions. A function that ends a ``with`` block may be stopped where no signal can.
    """
    files = {place.__file__ for place in places if hasattr(place, "__file__")}
    codes = {place.__code__ for place in places if hasattr(place, "__code__")}

    def start(frame, event, argument):
        return local if frame.f_code.co_filename in files or frame.f_code in codes else None

    def local(frame, event, argument):
        if event == "line" and next(lines) == last:
            raise KeyboardInterrupt
        return local

    for last in itertools.count():  # noqa: B007  # `local` reads it
        lines, prepared = itertools.count(), prepare()
        before = sys.gettrace()
        sys.settrace(start)
        try:
            work(prepared)
            return
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        yield prepared


def assert_goes_on(run, check, parts=(0.3, 0.8), inference_mode=True) -> None:
    """``check(run())`` holds after a run that ended in the middle, in inference mode, and after that."""
    import torch

    for part in parts:
        interrupt(run, part)
        check(run())
    for inference in (True, False) if inference_mode else (False,):
        with torch.inference_mode(inference):
            check(run())


def assert_stays_exact(gpu, device, run, expected, before: int, equal=None) -> None:
    """Two runs, interrupted ones and those after them give ``expected``, and leave nothing on ``device``.

    Args:
        gpu: the fixture.
        device: the device of an offloaded model.
        run: gives its output on the CPU.
        expected: that output.
        before: the bytes that were allocated on ``device`` without the model.
        equal: compares two outputs; by default they have the same bits.
    """
    import torch

    def check(output):
        if equal is not None:
            equal(output, expected)
        else:
            assert torch.equal(output, expected), f"off by {(output - expected).abs().max()}"
        assert gpu.allocated(device) == before, "weights stayed on the device"

    for _ in range(2):
        check(run())
    assert_goes_on(run, check)
