"""A GGUF layer is moved to the GPU and back by group offloading; calls of its weight's ``__torch_function__`` count."""

from __future__ import annotations

from ..case import CannotReproduce
from ..models import group_offload
from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch

    try:
        import gguf
        from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
    except (ImportError, AttributeError):
        raise CannotReproduce("this diffusers has no GGUF weights") from None

    class Weight(GGUFParameter):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            Weight.calls += 1
            return super().__torch_function__(func, types, args, kwargs)

    device = cuda()
    layer = GGUFLinear(32, 8, compute_dtype=torch.float32)
    layer.weight = Weight(torch.zeros(8, 34, dtype=torch.uint8), quant_type=gguf.GGMLQuantizationType.Q8_0)
    model = torch.nn.Sequential(layer)
    group_offload.apply(model, device)
    group = layer._diffusers_hook.get_hook("group_offloading").group
    with torch.no_grad():
        group.onload_()
        group.offload_()
        Weight.calls = 0
        group.onload_()
        group.offload_()
    assert Weight.calls == 0, (
        f"{Weight.calls} calls of its __torch_function__ to move one weight there and back"
    )
    return "the weight is moved as plain memory"
