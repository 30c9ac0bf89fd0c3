"""Taking an adapter of peft out of a 4-bit or 8-bit weight of bitsandbytes gives the very same bits back.

peft's layers dequantize the weight, add or subtract the product of the adapter, and quantize the sum anew. Each time
the weight is rounded once more. Here the packed weight from before the first merge is kept in the memory of the CPU
until nothing is merged any more.

Neither torch nor another library is imported here at module level.

Upstream: ``merge`` and ``unmerge`` of peft/tuners/lora/bnb.py; ``Params4bit`` and ``Int8Params`` of
bitsandbytes/nn/modules.py.
"""

from __future__ import annotations

import logging

from ..engine.probe import function_of, written_in
from ..weights.companions import is_quant_state, on_device
from ..weights.int8_params import in_tiles, rows_of
from ..weights.params_4bit import UNPACKED, unpacked_bytes
from .before_merge import KEPT, undone_on_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["forgets_deleted", "keeps_bits", "puts_bits_back", "quantizes_anew"]

logger = logging.getLogger(__name__.partition(".")[0])
_NO_ROOM = (
    "The CPU has not the memory to keep the packed weights from before this merge: taking the adapter out again "
    "rounds them once more."
)
_told: set[str] = set()

# The packed weight, the scales that go with it (a ``QuantState`` or the SCB of 8 bits), and the bias, if adapters have
# one to add to it, else None.
_Bits = tuple["Any", "Any", "Any"]


def quantizes_anew(cls: Any) -> bool:
    """Whether ``unmerge`` of a layer class of peft makes a new quantized weight, with nothing of ours around it."""
    unmerge = vars(cls)["unmerge"]
    names = {"Params4bit", "Int8Params"} & set(function_of(unmerge).__code__.co_names)
    return bool(names) and not written_in(unmerge, __file__)


def keeps_bits(original: Callable[..., Any]) -> Callable[..., Any]:
    """``merge`` of a layer of peft, which keeps the weight from before the first adapter."""

    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        base = self.get_base_layer()
        held = vars(self)
        merged = list(self.merged_adapters)
        kept = held.get(KEPT) if merged else None
        bits = None if merged and kept is None else _bits(self, base)
        if kept is not None:
            bits = _unless_changed(kept, bits)
        with undone_on_failure(self, base):
            result = original(self, *args, **kwargs)
            if self.merged_adapters == merged:
                return result
            if kept is None:
                bits = _on_the_cpu(bits)
            now = None if bits is None else _bits(self, base)
            checksum = None if now is None else _checksum(now[:2])
            if now is None or checksum is None:
                held.pop(KEPT, None)
            else:
                held[KEPT] = (bits, checksum, None if now[2] is None else now[2].to("cpu", copy=True))
        return result

    return merge


def puts_bits_back(original: Callable[..., Any]) -> Callable[..., Any]:
    """``unmerge`` of a layer of peft, after which the weight is the one from before the first adapter.

    Only if the weight is still what the last merge made it.
    """

    def unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
        base = self.get_base_layer()
        kept = vars(self).get(KEPT)
        bits = None if kept is None else _unless_changed(kept, _bits(self, base))
        with undone_on_failure(self, base):
            result = original(self, *args, **kwargs)
            if bits is not None and not self.merged_adapters:
                _put(base, bits)
        vars(self).pop(KEPT, None)
        return result

    return unmerge


def forgets_deleted(original: Callable[..., Any]) -> Callable[..., Any]:
    """``delete_adapter`` of a layer of peft: what was merged of a deleted adapter stays in the weight for good."""

    def delete_adapter(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        result = original(self, adapter_name, *args, **kwargs)
        if adapter_name in self.merged_adapters:
            vars(self).pop(KEPT, None)
        return result

    return delete_adapter


def _bits(adapter: Any, base: Any) -> _Bits | None:
    """The packed weight of ``base`` where it is, in its order; the tensors are its own. None if it is not packed."""
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
    adds_to_bias = base.bias is not None and any(getattr(adapter, "lora_bias", {}).values())
    bits = (*found, base.bias.data if adds_to_bias else None)
    return None if any(tensor.is_meta for tensor in _tensors(bits)) else bits


def _four_bit(weight: Any) -> Any:
    state = vars(weight).get("quant_state")
    if state is None or not vars(weight).get("bnb_quantized", True):
        return None
    if UNPACKED in vars(state):
        return unpacked_bytes(weight.data, state), on_device(vars(state)[UNPACKED], weight.device)
    if getattr(state, "packing_format_for_cpu", False):  # without the fix that can undo it
        return None
    # An object of its own: moving the old weight moves the state that it has.
    return weight.data, on_device(state, weight.device)


def _tensors(values: tuple[Any, ...]) -> Iterator[Any]:
    """All tensors, those of a quant state and of the one inside it too, each time in the same order."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif is_quant_state(value):
            held = vars(value)
            yield from _tensors(tuple(held[name] for name in sorted(held)))


def _unless_changed(kept: Any, now: _Bits | None) -> _Bits | None:
    """The kept bits, if ``now`` is what the last merge has made; without those of the bias, if that alone is not."""
    bits: _Bits
    bits, checksum, merged_bias = kept
    if now is None or _checksum(now[:2]) != checksum:
        return None
    bias = now[2]
    # The layer may have converted its bias to the dtype of its input.
    if bias is None or merged_bias is None or not merged_bias.to(bias.dtype).equal(bias.to("cpu")):
        return (*bits[:2], None)
    return bits


def _checksum(values: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Numbers that depend on every bit of the tensors; None where one has none, or no memory to compute it is left."""
    from ..weights.host_memory import fingerprint, random_numbers

    numbers: dict[Any, Any] = {}
    found = []
    try:
        for tensor in _tensors(values):
            if tensor.device not in numbers:
                numbers[tensor.device] = random_numbers(tensor.device)
            one = fingerprint(tensor, numbers[tensor.device])
            if one is None:
                return None
            found.append(int(one))
    except RuntimeError:
        return None
    return tuple(found)


def _on_the_cpu(bits: _Bits | None) -> _Bits | None:
    """The bits in memory of the CPU; None if that has no room for them. What is there already is not copied."""
    if bits is None:
        return None
    from ..weights.host_memory import has_room

    if has_room(sum(tensor.nbytes for tensor in _tensors(bits))):
        try:
            return _moved(bits, "cpu")
        except (MemoryError, RuntimeError):
            pass
    if _NO_ROOM not in _told:
        _told.add(_NO_ROOM)
        logger.warning("%s", _NO_ROOM)
    return None


def _moved(bits: _Bits, device: Any) -> _Bits:
    packed, scales, bias = bits
    return (
        packed.to(device),
        on_device(scales, device) if is_quant_state(scales) else scales.to(device),
        None if bias is None else bias.to(device),
    )


def _put(base: Any, bits: _Bits) -> None:
    """Give ``base`` the packed weight, on the device of the one that it has."""
    import torch

    now = base.weight
    packed, scales, bias = _moved(bits, now.device)
    weight = torch.Tensor._make_subclass(type(now), packed, now.requires_grad)
    vars(weight).update(vars(now))
    if is_quant_state(scales):
        vars(weight).update(quant_state=scales, bnb_quantized=True)
        if vars(base).get("quant_state") is not None:
            base.quant_state = scales
    else:
        # As it is before the first forward pass, which takes them into the state.
        weight.CB, weight.SCB = weight.data, scales
        base.state.reset_grads()
    base.weight = weight
    if bias is not None:
        base.bias.data = bias
