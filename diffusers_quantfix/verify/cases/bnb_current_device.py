"""A 4-bit layer runs on the second GPU; the current device must not change."""

from __future__ import annotations

from ..case import NeedsDevice


def case(work: str) -> str | None:
    import torch

    from ..models import four_bit

    if torch.cuda.device_count() < 2:
        raise NeedsDevice("needs two CUDA devices")
    torch.cuda.set_device(0)
    layer = four_bit.linear(torch.nn.Linear(64, 64), torch.device("cuda", 1))
    with torch.no_grad():
        layer(torch.ones(3, 64, device="cuda:1"))
    current = torch.cuda.current_device()
    assert current == 0, f"the current device was cuda:0, it is cuda:{current} now"
    return "a 4-bit layer was quantized and ran on cuda:1; the current device is still cuda:0"
