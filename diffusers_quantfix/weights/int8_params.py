"""Functions for quantized 8-bit weights of bitsandbytes, shared by several fixes: moving one, and getting its rows.

torch is not imported here at module level.

Upstream: bitsandbytes/nn/modules.py (``Int8Params.to``, ``Linear8bitLt``), bitsandbytes/autograd/_functions.py
(``MatmulLtState``).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["in_tiles", "moved_whole", "rows_of"]

# The order of the bytes within a tile, int64 on the CPU, by the name of the layout.  Upstream keeps one on the device
# for each layer.
_orders: dict[str, Any] = {}


def moved_whole(original: Any) -> Any:
    """An ``Int8Params.to`` that moves int8 data unchanged, with its SCB; CB is the moved data."""
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
            # On meta it has no values; the code that onloads the weight restores them (accelerate, from its weights
            # map).
            result.SCB = None if self.SCB.is_meta and device.type != "meta" else self.SCB.to(device)
        return result

    return to


def in_tiles(layer: Any) -> bool:
    """Whether a ``Linear8bitLt`` has its weight in tiles of the GPU's layout, as before 0.45 since its first pass."""
    return vars(layer.state).get("CxB") is not None


def rows_of(layer: Any) -> Any:
    """The weight, int8 [out_features, in_features], of a layer that has it in tiles: a new tensor where these are."""
    import torch
    from bitsandbytes.autograd._functions import get_tile_inds, undo_layout

    state, tiles = layer.state, layer.state.CxB
    order = state._tile_indices
    if order is None:
        order = _orders.get(state.formatB)
    if order is None:
        # A kernel of the GPU's tells the order, also for a layer that was moved away from there.
        where = tiles.device if tiles.is_cuda else torch.device("cuda", torch.cuda.current_device())
        order = _orders[state.formatB] = get_tile_inds(state.formatB, where).cpu()
    rows = undo_layout(tiles, order.to(tiles.device))
    return rows[: layer.out_features, : layer.in_features].contiguous()
