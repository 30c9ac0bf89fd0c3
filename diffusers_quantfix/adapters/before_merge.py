"""Unmerging a peft adapter from a quantized weight restores the exact bits; shared by the backends.

peft's layer classes for a quantization method dequantize the weight, add or subtract the adapter's delta, and quantize
the sum again. Each merge and unmerge rounds the weight once more. Here the packed weight from before the first merge is
kept in host memory until no adapter is merged.

Each backend defines the bits of a layer and how to restore its weight from them. Bits are a pair: the parts (a tensor,
a bitsandbytes ``QuantState``, or a tuple of these and of non-tensors), and the data of the bias if the adapters change
it, else None.

torch is not imported here at module level.

Upstream: ``merge`` and ``unmerge`` of peft's layers (peft/tuners/lora/layer.py, peft/tuners/lora/bnb.py,
peft/tuners/lora/torchao.py).
"""

from __future__ import annotations

import logging
from functools import partial

from ..engine.interruptions import heed_interruption
from ..engine.log import log
from ..engine.probe import function_of
from ..finishing import finished_after
from ..offloading.uncompiled import uncompiled_later
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


# The attribute of a peft layer that holds its weight from before the first merge. It is a tuple: torch would register a
# bare Parameter, and unpickling a class of ours would need this package.
KEPT = "_quantfix_before_merge"
_NO_ROOM = (
    "There is not enough host memory to keep the packed weights from before this merge: unmerging the adapter "
    "rounds them once more."
)
_told: set[str] = set()

_Bits = tuple["Any", "Any"]


def rounds_again(cls: Any, *quantizes: str) -> bool:
    """Whether ``unmerge`` of a peft layer class makes a new quantized weight.

    Args:
        cls: the class.
        quantizes: code that quantizes uses at least one of these names.
    """
    unmerge = vars(cls)["unmerge"]
    names = set(quantizes) & set(function_of(unmerge).__code__.co_names)
    return bool(names)


def keeps_bits(bits_of: Callable[[Any, Any], _Bits | None]) -> Callable[[Callable[..., Any]], Any]:
    """Return the wrapper of a peft layer's ``merge`` that keeps the weight from before the first merge.

    Args:
        bits_of: takes a peft layer and its base layer and returns the base layer's bits, on their current device, or
            None if there are none. The order of the tensors must not depend on the device, and moving the layer must
            not replace them.
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

            def merge_and_keep() -> Any:
                result = original(self, *args, **kwargs)
                if self.merged_adapters == merged:
                    return result
                before = _on_the_cpu(bits) if kept is None else bits
                now = None if before is None else _present(bits_of(self, base))
                checksum = None if now is None else _checksum(now[0])
                if now is None or checksum is None:
                    held.pop(KEPT, None)
                else:
                    held[KEPT] = (before, checksum, None if now[1] is None else now[1].to("cpu", copy=True))
                return result

            return undone_on_failure(self, base, merge_and_keep)

        return merge

    return wrap


def puts_bits_back(
    bits_of: Callable[[Any, Any], _Bits | None], put: Callable[[Any, Any], None]
) -> Callable[[Callable[..., Any]], Any]:
    """Return the wrapper of a peft layer's ``unmerge`` that restores the weight from before the first merge.

    It does so only if the weight is still the result of the last merge.

    Args:
        bits_of: as for `keeps_bits`.
        put: ``put(base, parts)`` gives the base layer the weight made of ``parts``, which are on the weight's device.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
            base = self.get_base_layer()
            kept = vars(self).get(KEPT)
            bits = None if kept is None else _unless_changed(kept, _present(bits_of(self, base)))

            def unmerge_and_restore() -> Any:
                result = original(self, *args, **kwargs)
                if bits is not None and not self.merged_adapters:
                    parts, bias = _moved(bits, base.weight.device)
                    put(base, parts)
                    if bias is not None:
                        base.bias.data = bias
                return result

            result = undone_on_failure(self, base, unmerge_and_restore)
            vars(self).pop(KEPT, None)
            return result

        return unmerge

    return wrap


def where_quantized(wrap: Callable[[Callable[..., Any]], Any]) -> Callable[[Callable[..., Any]], Any]:
    """``wrap`` for a class that serves both plain and quantized layers.

    The original is called if the layer's ``quantization_backend`` is None or cannot merge, and if the base layer has no
    ``weight``: merging into an HQQ layer replaces the layer.
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
    """Wrap ``delete_adapter`` of a peft layer: a deleted adapter's delta stays, so the kept weight is dropped."""

    def delete_adapter(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        result = original(self, adapter_name, *args, **kwargs)
        if adapter_name in self.merged_adapters:
            vars(self).pop(KEPT, None)
        return result

    return delete_adapter


@uncompiled_later
def undone_on_failure(adapter: Any, base: Any, change: Callable[[], Any]) -> Any:
    """Return ``change()``; if it raises, restore weight, bias and state of ``base``, and the list of merged adapters.

    Args:
        adapter: a peft layer.
        base: its base layer, which has a ``weight``.
        change: merges or unmerges.
    """
    bias = base.bias
    merged = list(adapter.merged_adapters)
    bias_before = None if bias is None else bias.data.clone()
    # peft marks the old weight as not quantized, clears the state of an 8-bit layer and drops cached DoRA norms.
    owners = (base.weight, base, getattr(base, "state", None))
    held = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
    # The dict of parameters itself: accelerate leaves torchao weights in it that torch does not accept as parameters.
    held += [one for one in (base._parameters, getattr(adapter, "_caches", None)) if isinstance(one, dict)]
    before = [dict(one) for one in held]
    kept = {name: value for name, value in vars(adapter).items() if name == KEPT}
    whole = False

    def steps() -> Iterator[Callable[[], Any]]:
        if whole:
            return
        if bias is not None:
            yield partial(setattr, bias, "data", bias_before)
        for one, values in zip(held, before, strict=True):
            yield partial(_restore, one, values)
        yield partial(adapter.merged_adapters.__setitem__, slice(None), merged)
        yield partial(vars(adapter).update, kept) if kept else partial(vars(adapter).pop, KEPT, None)

    def work() -> Any:
        nonlocal whole
        result = change()
        whole = True
        return result

    return finished_after(work, steps)


def _restore(namespace: dict[str, Any], values: dict[str, Any]) -> None:
    """Make them equal, and never less than ``values``: it may be the ``__dict__`` of a module."""
    namespace.update(values)
    for name in namespace.keys() - values.keys():
        del namespace[name]


def _present(bits: _Bits | None) -> _Bits | None:
    """The bits, or None if any of them is on meta."""
    return None if bits is None or any(tensor.is_meta for tensor in _tensors(bits)) else bits


def _tensors(value: Any) -> Iterator[Any]:
    """All tensors in a fixed order, including those of quant states and their nested states."""
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
    """``value`` with its tensors on ``device``; tensors already there are not copied."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is tuple:
        return tuple([_moved(part, device) for part in value])
    return on_device(value, device) if is_quant_state(value) else value


def _unless_changed(kept: Any, now: _Bits | None) -> _Bits | None:
    """The kept bits if ``now`` is the result of the last merge, else None; without the bias if only that differs."""
    (parts, bias), checksum, merged_bias = kept
    if now is None or _checksum(now[0]) != checksum:
        return None
    # The layer may have converted its bias to the dtype of its input.
    same = merged_bias is not None and now[1] is not None and merged_bias.to(now[1].dtype).equal(now[1].cpu())
    return parts, bias if same else None


def _checksum(parts: Any) -> tuple[int, ...] | None:
    """One number per tensor that depends on its every bit; None if a tensor has no fingerprint or memory runs out."""
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
    """The bits in host memory, or None if they do not fit. Tensors already on the CPU are not copied."""
    if bits is None:
        return None
    import torch

    from ..weights.host_memory import has_room

    if has_room(sum(tensor.nbytes for tensor in _tensors(bits))):
        try:
            # A tensor created in inference mode could not be used in training later.
            with torch.inference_mode(False):
                moved: _Bits = _moved(bits, "cpu")
                return moved
        except (MemoryError, RuntimeError) as error:
            heed_interruption(error)
    if _NO_ROOM not in _told:
        _told.add(_NO_ROOM)
        log(logging.WARNING, "%s", _NO_ROOM)
    return None
