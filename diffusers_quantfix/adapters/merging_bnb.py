"""The bits of a 4-bit or 8-bit bitsandbytes weight, for `before_merge`.

peft's layers round the weight once more with each merge and unmerge.

Neither torch nor another library is imported here at module level.

Upstream: ``merge`` and ``unmerge`` of peft/tuners/*/bnb.py; ``Params4bit`` and ``Int8Params`` of
bitsandbytes/nn/modules.py.
"""

from __future__ import annotations

from ..engine.errors import TargetMissing
from ..weights.companions import is_quant_state, on_device
from ..weights.int8_params import in_tiles, rows_of
from ..weights.params_4bit import UNPACKED, unpacked_bytes
from .before_merge import forgets_deleted, keeps_bits, puts_bits_back, rounds_again

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ..engine.draft import Draft

__all__ = ["bits_of", "patch_layers", "put", "round_again"]


def bits_of(adapter: Any, base: Any) -> Any:
    """The bits of ``base`` for `before_merge`: the packed weight and its scales. None if it is not quantized."""
    weight = base.weight
    kind = type(weight).__name__
    found: Any = None
    if kind == "Params4bit":
        found = _four_bit(weight)
    elif kind == "Int8Params":
        scales = weight.SCB if getattr(weight, "SCB", None) is not None else base.state.SCB
        if scales is not None and str(weight.dtype) == "torch.int8":
            found = (rows_of(base) if in_tiles(base) else weight.data), scales
    if found is None:
        return None
    # A LoRA may add its own bias to it; a RoAd rotates it together with the weight.
    changes_bias = any(getattr(adapter, "lora_bias", {}).values()) or hasattr(adapter, "road_theta")
    return found, base.bias.data if base.bias is not None and changes_bias else None


def _layers(bnb: ModuleType) -> list[type]:
    """The 8-bit and 4-bit layer classes of a peft module ``bnb``; peft may define only one of them.

    Raises:
        TargetMissing: no class has both ``merge`` and ``unmerge``.
    """
    classes = [
        cls
        for name, cls in vars(bnb).items()
        if name in ("Linear8bitLt", "Linear4bit") and {"merge", "unmerge"} <= set(vars(cls))
    ]
    if not classes:
        raise TargetMissing(f"{bnb.__name__} has no Linear4bit.unmerge")
    return classes


def round_again(bnb: ModuleType) -> bool:
    """Whether ``unmerge`` of one of these classes quantizes."""
    return any(rounds_again(cls, "Params4bit", "Int8Params") for cls in _layers(bnb))


def patch_layers(bnb: ModuleType, draft: Draft) -> None:
    """Wrap the methods of these classes so that unmerging restores the bits from before the first merge."""
    for cls in _layers(bnb):
        draft.wrap_plain(cls, "merge", keeps_bits(bits_of))
        draft.wrap_plain(cls, "unmerge", puts_bits_back(bits_of, put))
        draft.wrap_plain(cls, "delete_adapter", forgets_deleted)


def _four_bit(weight: Any) -> Any:
    state = vars(weight).get("quant_state")
    if state is None or not vars(weight).get("bnb_quantized", True):
        return None
    if UNPACKED in vars(state):
        return unpacked_bytes(weight.data, state), on_device(vars(state)[UNPACKED], weight.device)
    if getattr(state, "packing_format_for_cpu", False):  # repacked without the fix that can undo it
        return None
    # A separate object: moving the old weight moves its state.
    return weight.data, on_device(state, weight.device)


def put(base: Any, parts: Any) -> None:
    """Give ``base`` the packed weight and its scales."""
    import torch

    now = base.weight
    packed, scales = parts
    weight = torch.Tensor._make_subclass(type(now), packed, now.requires_grad)
    vars(weight).update(vars(now))
    if is_quant_state(scales):
        vars(weight).update(quant_state=scales, bnb_quantized=True)
        if vars(base).get("quant_state") is not None:
            base.quant_state = scales
    else:
        # As before the first forward pass, which moves them into the state.
        weight.CB, weight.SCB = weight.data, scales
        base.state.reset_grads()
    base.weight = weight
