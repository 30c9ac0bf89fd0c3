"""A float8 layer on an NVIDIA GPU multiplies and adds its bias."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..case import CannotReproduce
    from ..models import quanto_models

    # The bug is in CUDA kernels: it needs a torch built for CUDA, which the rig's is not.
    if (
        torch.version.cuda is None
        or not torch.cuda.is_available()
        or torch.cuda.get_device_capability()[0] < 8
    ):
        raise CannotReproduce("needs an NVIDIA GPU of compute capability 8.0 or newer")
    reference = quanto_models.run(quanto_models.plain_layers())
    model = quanto_models.layers("qfloat8", torch.float16).to("cuda")
    with torch.no_grad():
        given = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
        output = model(given.to("cuda", torch.float16)).cpu()
    off = quanto_models.error(output, reference)
    assert off < 0.08, f"relative error {off:.2f}"
    return f"{type(model[0].weight).__name__} on the GPU; relative error {off:.3f}"
