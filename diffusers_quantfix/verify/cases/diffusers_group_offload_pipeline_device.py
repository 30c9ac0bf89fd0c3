"""LEdits++ encodes an image while its text encoder and its denoiser are group-offloaded."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    from ..models import group_pipelines, ledits

    device = cuda()
    latents = ledits.encoded(group_pipelines.classic(device))
    assert latents.device == device, f"the latents are on {latents.device}"
    return f"the image is encoded on {device}"
