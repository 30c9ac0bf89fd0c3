"""Real CUDA devices that are late: kernels that only wait are put in front of what their streams do.

    with slow.streams(seed=0):
        pipe(...)

The copies of a tiny model are done before the next line of Python runs, so that a race that is there is hardly ever
lost. Here the streams of copies, the streams of computations or both wait for about a millisecond at random moments.
It shows what the rig cannot (`tests.rig.late`): the real order, torch's own allocator, and what bitsandbytes' kernels
do. What it cannot show is a race that is not lost.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch

_CYCLES = 2_000_000  # of the device's clock, which has 1 to 2 GHz
# How often a stream waits: when it becomes the current one, and before a layer's forward.
_OFTEN = ((0.7, 0.0), (0.0, 0.3), (0.5, 0.2))


@contextlib.contextmanager
def streams(seed: int, layers: bool = True) -> Iterator[None]:
    """In the block the streams are late; ``layers=False`` leaves the forward passes of layers without a hook."""
    chance = random.Random(seed)
    # Its gradients of short sequences are not numbers on Hopper with torch 2.11 (pytorch#196678).
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    copies, computes = chance.choice(_OFTEN)
    enter = torch.cuda.StreamContext.__enter__

    def late(self: Any) -> None:
        enter(self)
        _wait(chance, copies)

    hook = None
    if layers and computes:
        hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: _wait(chance, computes))
    torch.cuda.StreamContext.__enter__ = late
    try:
        yield
    finally:
        torch.cuda.StreamContext.__enter__ = enter
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        if hook is not None:
            hook.remove()
        torch.cuda.synchronize()


def _wait(chance: random.Random, often: float) -> None:
    if not torch.compiler.is_compiling() and chance.random() < often:
        torch.cuda._sleep(_CYCLES)
