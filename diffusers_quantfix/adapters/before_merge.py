"""Taking an adapter of peft out of a quantized weight gives the very same bits back; shared by the backends.

Where peft has layers of its own for a quantization method, they dequantize the weight, add or subtract the product of
the adapter, and quantize the sum anew. Each time the weight is rounded once more. Here the packed weight from before
the first merge is kept in the memory of the CPU until nothing is merged any more.

Each backend says what the bits of a layer are, and how they become its weight again. Bits are a pair: the parts (a
tensor, a ``QuantState`` of bitsandbytes, or a tuple of these and of what is no tensor), and the data of the bias if
adapters have one to add to it, else None.

torch is not imported here at module level.

Upstream: ``merge`` and ``unmerge`` of peft's layers (peft/tuners/lora/layer.py, peft/tuners/lora/bnb.py,
peft/tuners/lora/torchao.py).
"""

from __future__ import annotations

import contextlib
import logging

from ..engine.probe import function_of, written_in
from ..weights.companions import is_quant_state, on_device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = [
    "KEPT",
    "forgets_deleted",
    "keeps_bits",
    "puts_bits_back",
    "rounds_again",
    "undone_on_failure",
    "where_quantized",
]

logger = logging.getLogger(__name__.partition(".")[0])

# The attribute of a layer of peft with its weight from before the first merge: in a tuple, as torch registers a bare
# Parameter as one of the layer, and a class of ours would have to be there to unpickle it.
KEPT = "_quantfix_before_merge"
_NO_ROOM = (
    "The CPU has not the memory to keep the packed weights from before this merge: taking the adapter out again "
    "rounds them once more."
)
_told: set[str] = set()

_Bits = tuple["Any", "Any"]


def rounds_again(cls: Any, *quantizes: str) -> bool:
    """Whether ``unmerge`` of a layer class of peft makes a new quantized weight, with nothing of ours around it.

    Args:
        cls: the class.
        quantizes: names, any of which its code uses if it does.
    """
    unmerge = vars(cls)["unmerge"]
    names = set(quantizes) & set(function_of(unmerge).__code__.co_names)
    return bool(names) and not written_in(unmerge, __name__)


def keeps_bits(bits_of: Callable[[Any, Any], _Bits | None]) -> Callable[[Callable[..., Any]], Any]:
    """How to wrap ``merge`` of a layer of peft, so that it keeps the weight from before the first adapter.

    Args:
        bits_of: from a layer of peft and the layer below it to its bits: where they are, in an order that does not
            depend on where that is, and in tensors that no move of the layer exchanges. None where there are none.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
            base = self.get_base_layer()
            held = vars(self)
            merged = list(self.merged_adapters)
            kept = held.get(KEPT) if merged else None
            bits = None if merged and kept is None else _present(bits_of(self, base))
            if kept is not None:
                bits = _unless_changed(kept, bits)
            with undone_on_failure(self, base):
                result = original(self, *args, **kwargs)
                if self.merged_adapters == merged:
                    return result
                if kept is None:
                    bits = _on_the_cpu(bits)
                now = None if bits is None else _present(bits_of(self, base))
                checksum = None if now is None else _checksum(now[0])
                if now is None or checksum is None:
                    held.pop(KEPT, None)
                else:
                    held[KEPT] = (bits, checksum, None if now[1] is None else now[1].to("cpu", copy=True))
            return result

        return merge

    return wrap


def puts_bits_back(
    bits_of: Callable[[Any, Any], _Bits | None], put: Callable[[Any, Any], None]
) -> Callable[[Callable[..., Any]], Any]:
    """How to wrap ``unmerge`` of a layer of peft, after which the weight is the one from before the first adapter.

    Only if the weight is still what the last merge made it.

    Args:
        bits_of: as for `keeps_bits`.
        put: gives the layer below, its first argument, the weight of the parts, its second, which are where the weight
            is.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
            base = self.get_base_layer()
            kept = vars(self).get(KEPT)
            bits = None if kept is None else _unless_changed(kept, _present(bits_of(self, base)))
            with undone_on_failure(self, base):
                result = original(self, *args, **kwargs)
                if bits is not None and not self.merged_adapters:
                    parts, bias = _moved(bits, base.weight.device)
                    put(base, parts)
                    if bias is not None:
                        base.bias.data = bias
            vars(self).pop(KEPT, None)
            return result

        return unmerge

    return wrap


def where_quantized(wrap: Callable[[Callable[..., Any]], Any]) -> Callable[[Callable[..., Any]], Any]:
    """``wrap`` for a class of plain and quantized layers.

    A layer is left as it is where its ``quantization_backend`` is None or cannot merge, and where the layer below has
    no ``weight``: for one of HQQ merging puts a new layer.
    """

    def wrap_both(original: Callable[..., Any]) -> Callable[..., Any]:
        quantized = wrap(original)

        def merge_or_unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
            backend = self.quantization_backend
            packed = (
                backend is not None and backend.supports_merge and hasattr(self.get_base_layer(), "weight")
            )
            return (quantized if packed else original)(self, *args, **kwargs)

        return merge_or_unmerge

    return wrap_both


def forgets_deleted(original: Callable[..., Any]) -> Callable[..., Any]:
    """``delete_adapter`` of a layer of peft: what was merged of a deleted adapter stays in the weight for good."""

    def delete_adapter(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        result = original(self, adapter_name, *args, **kwargs)
        if adapter_name in self.merged_adapters:
            vars(self).pop(KEPT, None)
        return result

    return delete_adapter


@contextlib.contextmanager
def undone_on_failure(adapter: Any, base: Any) -> Iterator[None]:
    """If the block raises, weight, bias and state of ``base``, and what counts as merged, are what they were before.

    Args:
        adapter: a layer of peft.
        base: the layer below it, which has a ``weight``.
    """
    bias = base.bias
    merged = list(adapter.merged_adapters)
    bias_before = None if bias is None else bias.data.clone()
    # peft marks the old weight itself as not quantized, clears the state of an 8-bit layer and forgets norms of DoRA.
    owners = (base.weight, base, getattr(base, "state", None))
    held = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
    # The parameters themselves: accelerate leaves weights of torchao that torch does not take for parameters.
    held += [one for one in (base._parameters, getattr(adapter, "_caches", None)) if isinstance(one, dict)]
    before = [dict(one) for one in held]
    try:
        yield
    except BaseException:
        if bias is not None:
            bias.data = bias_before
        for one, values in zip(held, before, strict=True):
            one.clear()
            one.update(values)
        adapter.merged_adapters[:] = merged
        raise


def _present(bits: _Bits | None) -> _Bits | None:
    """None for bits that have no data here."""
    return None if bits is None or any(tensor.is_meta for tensor in _tensors(bits)) else bits


def _tensors(value: Any) -> Iterator[Any]:
    """All tensors, those of a quant state and of the one inside it too, each time in the same order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) is tuple:
        for part in value:
            yield from _tensors(part)
    elif is_quant_state(value):
        held = vars(value)
        for name in sorted(held):
            yield from _tensors(held[name])


def _moved(value: Any, device: Any) -> Any:
    """The same with its tensors on ``device``; those that are there are not copied."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is tuple:
        return tuple([_moved(part, device) for part in value])
    return on_device(value, device) if is_quant_state(value) else value


def _unless_changed(kept: Any, now: _Bits | None) -> _Bits | None:
    """The kept bits, if ``now`` is what the last merge has made; without those of the bias, if that alone is not."""
    (parts, bias), checksum, merged_bias = kept
    if now is None or _checksum(now[0]) != checksum:
        return None
    # The layer may have converted its bias to the dtype of its input.
    same = merged_bias is not None and now[1] is not None and merged_bias.to(now[1].dtype).equal(now[1].cpu())
    return parts, bias if same else None


def _checksum(parts: Any) -> tuple[int, ...] | None:
    """Numbers that depend on every bit of the tensors; None where one has none, or no memory to compute it is left."""
    from ..weights.host_memory import fingerprint, random_numbers

    numbers: dict[Any, Any] = {}
    found = []
    try:
        for tensor in _tensors(parts):
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
    import torch

    from ..weights.host_memory import has_room

    if has_room(sum(tensor.nbytes for tensor in _tensors(bits))):
        try:
            # A tensor that is made in inference mode can take no part in training later.
            with torch.inference_mode(False):
                moved: _Bits = _moved(bits, "cpu")
                return moved
        except (MemoryError, RuntimeError):
            pass
    if _NO_ROOM not in _told:
        _told.add(_NO_ROOM)
        logger.warning("%s", _NO_ROOM)
    return None
