"""``torch.load`` with a dict as ``map_location``, for the cases of every backend with wrappers."""

from __future__ import annotations

from ..case import NeedsDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def check(models: Mapping[str, Any]) -> str:
    """Save the parameters of ``models`` (name for messages -> model), and load them onto the GPU.

    Raises:
        NeedsDevice: there is no CUDA device.
    """
    import io

    import torch

    if not torch.cuda.is_available():
        raise NeedsDevice("needs a CUDA device")
    for kind, model in models.items():
        file = io.BytesIO()
        # Not the model: with some releases of torchao that has another bug.
        torch.save({name: parameter.detach() for name, parameter in model.named_parameters()}, file)
        file.seek(0)
        for name, tensor in torch.load(file, map_location={"cpu": "cuda:0"}, weights_only=False).items():
            assert tensor.device.type == "cuda", f"{kind}: {name} reports another device than it is on"
    return f"weights of kind {', '.join(models)} are on one device"
