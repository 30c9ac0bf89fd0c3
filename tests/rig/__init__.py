"""The rig: two fake CUDA devices for torch, so that device code is tested where there is no GPU.

Tensors on ``cuda:0`` and ``cuda:1`` lie in host memory, but everything about *where a tensor is and what keeps it
alive* is genuine: they say ``device=cuda:1``, mixed devices raise what CUDA raises, every byte allocated on a device
and every byte copied between devices is counted. The numbers come from the CPU kernels. bitsandbytes runs on it, and
gloo takes its tensors from process to process. It was seen to work with torch 2.5.1, 2.6.0, 2.7.1, 2.8.0, 2.9.1,
2.10.0, 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0, CPU-only or built for CUDA: see `without_cuda`, which has to come
before the import of torch.

    from tests import rig

    with rig.devices():
        x = torch.ones(1000).to("cuda:1")
        rig.allocated("cuda:1")   # 4000
        rig.traffic().h2d         # 4000

Tests should ask for the ``gpu`` fixture (``tests/rig/fixtures.py``), which prefers real devices. Copies are done at
once, as if every program waited for them; with ``devices(late=True)`` they are not, see `late`. The devices can go
under XPU's name, too: see `accelerator`.

Importing this package imports neither torch nor anything else of weight.
"""

from __future__ import annotations

from .api import (
    LATE,
    NOT_WAITED,
    Traffic,
    allocated,
    are_on,
    assert_waited,
    device_count,
    devices,
    hazards,
    is_late_asked_for,
    load,
    overlapping,
    peak,
    reset,
    traffic,
    unavailable_reason,
    unfreeze_libraries,
)

__all__ = [
    "LATE",
    "NOT_WAITED",
    "Traffic",
    "allocated",
    "are_on",
    "assert_waited",
    "device_count",
    "devices",
    "hazards",
    "is_late_asked_for",
    "load",
    "overlapping",
    "peak",
    "reset",
    "traffic",
    "unavailable_reason",
    "unfreeze_libraries",
]
