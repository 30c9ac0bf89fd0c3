"""An audio autoencoder with weight normalization runs under the components manager."""

from __future__ import annotations

from ..case import CannotReproduce
from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch

    from ..models import audio

    device = cuda()
    try:
        from diffusers import ComponentsManager
    except ImportError:
        raise CannotReproduce("this diffusers has no components manager") from None
    before = torch.cuda.memory_allocated(device)
    manager, model = ComponentsManager(), audio.oobleck()
    manager.add("codec", model)
    manager.enable_auto_cpu_offload(device=device)
    with torch.no_grad():
        model(torch.zeros(1, 2, 64, device=device))
    manager.disable_auto_cpu_offload()
    left = torch.cuda.memory_allocated(device) - before
    assert left <= 0, f"{left} bytes are still on {device} after the run"
    return f"0 bytes are on {device} after the run"
