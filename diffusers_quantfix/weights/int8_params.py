"""Functions for quantized 8-bit weights of bitsandbytes, shared by several fixes.

torch is not imported here at module level.

Upstream: bitsandbytes/nn/modules.py (``Int8Params.to``, ``Linear8bitLt``), bitsandbytes/autograd/_functions.py
(``MatmulLtState``).
"""

from __future__ import annotations

import sys

from ..engine.errors import Undecided
from ..engine.probe import names_used

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = [
    "in_tiles",
    "moved_whole",
    "refuses_to_shard",
    "rows_for_dequantizing",
    "rows_of",
    "takes_tiles_for_rows",
]

# Name of the layout -> order of the bytes within a tile, int64 on the CPU. Upstream keeps one per layer on the device.
_orders: dict[str, Any] = {}


def moved_whole(original: Any) -> Any:
    """Wrap ``Int8Params.to``: int8 data is moved unchanged, with its SCB; CB is the moved data."""
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
    """Whether a ``Linear8bitLt`` has its weight in tiles of the GPU's layout: before 0.45, after its first pass."""
    return vars(layer.state).get("CxB") is not None


def rows_of(layer: Any) -> Any:
    """The weight of a layer that has it in tiles: a new int8 tensor [out_features, in_features] on the same device."""
    return _rows(layer.state, (layer.out_features, layer.in_features))


def rows_for_dequantizing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dequantize_bnb_weight(weight, ...)`` of any library: a weight in tiles is converted to rows first."""

    def dequantize_bnb_weight(weight: Any, *args: Any, **kwargs: Any) -> Any:
        for state in (*args, *kwargs.values()):
            tiles = getattr(state, "CxB", None)
            if tiles is not None and tiles.data_ptr() == weight.data_ptr():
                rows = _rows(state, tiles.shape if state.SB is None else state.SB[0])
                packed = weight
                weight = type(packed)._make_subclass(type(packed), rows, False)
                vars(weight).update(vars(packed))
        return original(weight, *args, **kwargs)

    return dequantize_bnb_weight


def takes_tiles_for_rows(dequantize_bnb_weight: Any) -> bool:
    """Whether ``dequantize_bnb_weight`` treats the bytes of a weight as rows, although they may be in tiles.

    Raises:
        Undecided: bitsandbytes, which may have tiles or not, is not imported yet, or only partly.
    """
    product = getattr(sys.modules.get("bitsandbytes.autograd._functions"), "MatMul8bitLt", None)
    if product is None:
        raise Undecided("bitsandbytes.autograd._functions")
    if "igemmlt" not in names_used(product.forward):  # the matrix product on tiles
        return False
    return "igemmlt" not in names_used(dequantize_bnb_weight)


def refuses_to_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's ``fully_shard``: it raises ValueError, before any change, if it would shard an 8-bit weight."""
    import inspect

    can_ignore = "ignored_params" in inspect.signature(original).parameters

    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        ignored = {id(one) for one in kwargs.get("ignored_params") or ()}
        modules = module if isinstance(module, (list, tuple)) else [module]
        parameters = (one for part in modules for one in part.parameters())
        count = len({id(one) for one in parameters if type(one).__name__ == "Int8Params"} - ignored)
        if count:
            way = "pass them to each call of fully_shard as `ignored_params`, then every process keeps them whole, or "
            raise ValueError(
                f"fully_shard cannot shard the 8-bit weights of bitsandbytes ({count} in what is to be sharded), "
                f"their scales would be lost: {way if can_ignore else ''}load the model in 4 bits with a floating "
                "`bnb_4bit_quant_storage`"
            )
        return original(module, *args, **kwargs)

    return fully_shard


def _rows(state: Any, shape: Any) -> Any:
    import torch
    from bitsandbytes.autograd._functions import get_tile_inds, undo_layout

    tiles = state.CxB
    order = state._tile_indices
    if order is None:
        order = _orders.get(state.formatB)
    if order is None:
        # Only a GPU kernel knows the order, even if the layer was moved off the GPU.
        where = tiles.device if tiles.is_cuda else torch.device("cuda", torch.cuda.current_device())
        order = _orders[state.formatB] = get_tile_inds(state.formatB, where).cpu()
    rows = undo_layout(tiles, order.to(tiles.device))
    return rows[: shape[0], : shape[1]].contiguous()
