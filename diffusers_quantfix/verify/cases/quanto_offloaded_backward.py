"""A gradient passes through quanto layers that were offloaded in groups after their forward pass."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..case import CannotReproduce, NeedsDevice
    from ..models import quanto_models

    if not torch.cuda.is_available():
        raise NeedsDevice("needs a CUDA device")
    try:
        from diffusers.hooks import apply_group_offloading
    except ImportError:
        raise CannotReproduce("this diffusers has no group offloading") from None
    device = torch.device("cuda", torch.cuda.current_device())

    def gradient(model):
        inputs = torch.ones(3, 256, device=device, requires_grad=True)
        model(inputs).sum().backward()
        return inputs.grad

    expected = gradient(quanto_models.layers("qint8").to(device))
    model = quanto_models.layers("qint8").to(device)
    apply_group_offloading(
        model, onload_device=device, offload_device=torch.device("cpu"), offload_type="leaf_level"
    )
    assert torch.equal(gradient(model), expected), "the gradient differs"
    return "the gradient of the model that stays on the device"
