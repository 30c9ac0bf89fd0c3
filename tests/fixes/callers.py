"""How users call it: every test of offloading with and without the index of a device, and ended in the middle."""

from __future__ import annotations

import pytest

_says = {"index": True}


@pytest.fixture(autouse=True, params=["cuda:0", "cuda"])
def spelling(request, monkeypatch):
    """Every test of a module that imports this runs twice: with the index of the device, and as upstream's
    documentation writes it, ``torch.device("cuda")``."""
    monkeypatch.setitem(_says, "index", ":" in request.param)


def spelled(device):
    """``device`` as the test says it; without an index it is the current device from then on."""
    import torch

    device = torch.device(device)
    if _says["index"] or device.type == "cpu":
        return device
    torch.cuda.set_device(device)
    return torch.device(device.type)


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
