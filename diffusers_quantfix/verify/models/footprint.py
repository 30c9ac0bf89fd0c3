"""The reported and the real size of a quantized model, for the cases."""

from __future__ import annotations

from ..case import CannotReproduce

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def reported(model: Any) -> str:
    """Quantize ``model``, without buffers, to int8 and assert that ``get_memory_footprint`` gives its size."""
    import torch

    model = model.to(torch.bfloat16).requires_grad_(False)
    before = model.get_memory_footprint(return_buffers=False)
    try:
        from optimum import quanto
    except ImportError:
        try:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
        except ImportError:
            raise CannotReproduce("needs optimum-quanto or torchao") from None
        quantize_(model, Int8WeightOnlyConfig())
    else:
        quanto.quantize(model, weights=quanto.qint8)
        quanto.freeze(model)
    real = sum(map(held, model.parameters()))
    size = model.get_memory_footprint(return_buffers=False)
    assert size == real, f"{size} bytes are reported, {real} are held ({before} before it was quantized)"
    return f"{size} bytes, {before} before it was quantized"


def held(tensor: Any) -> Any:
    """The bytes of a tensor, by those of the plain tensors in it."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.untyped_storage().nbytes()
    return sum(held(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
