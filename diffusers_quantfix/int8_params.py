"""The move of an 8-bit parameter of bitsandbytes that is quantized already.

Two fixes of different releases give it to ``Int8Params``.  torch is not imported here at module level.

Upstream: bitsandbytes/nn/modules.py (``Int8Params.to``).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["moved_whole"]


def moved_whole(original: Any) -> Any:
    """An ``Int8Params.to`` that moves int8 data as it is, with its SCB; CB is the moved data."""
    import torch

    parse = torch._C._nn._parse_to
    make_subclass = torch.Tensor._make_subclass
    int8 = torch.int8

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        quantized = self.data.dtype == int8
        device, dtype, non_blocking, _ = parse(*args, **kwargs)
        if not quantized or dtype not in (None, int8):
            return original(self, *args, **kwargs)
        result = make_subclass(
            type(self), self.data.to(device, non_blocking=non_blocking), self.requires_grad
        )
        vars(result).update(vars(self))
        result.CB = result.data
        if self.SCB is not None and device is not None:
            # On meta it has no values; whoever fetches the weight brings them (accelerate, from its weights map).
            result.SCB = None if self.SCB.is_meta and device.type != "meta" else self.SCB.to(device)
        return result

    return to
