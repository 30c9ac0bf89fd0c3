"""Host copies of weights: kept while the weights are on a device, and used again when the weights come back.

Upstream moves a component with ``Module._apply``: each weight is copied to the device and its CPU memory is freed, and
on the way back each weight is copied again (`accelerate.hooks.CpuOffload`, ``DiffusionPipeline.to``). Here the CPU
tensors are kept while their weights are on a device. Before a component goes back, each unchanged weight is replaced by
its host copy, so that upstream has nothing left to move.

Unchanged means equal content, see `fingerprint`. Neither versions nor addresses of tensors reveal a write through
``weight.data``, which is how LoRAs are merged and averaged weights are loaded.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..engine.classes import attributes
from ..engine.interruptions import heed_interruption
from ..engine.locks import Lock
from ..loading.device import accelerator_types
from ..placement.counting import CPU
from ..placement.modules import modules_of
from ..weights.companions import companions
from ..weights.host_memory import MappedFiles, fingerprint, free_memory, has_room, random_numbers
from ..weights.wrappers import follow, inner_places, is_wrapper

__all__ = ["keep", "stop"]

_METHOD = "_apply"
_KEPT = "_quantfix_host_copies"
_Key = tuple[int, str]
_PATIENCE = 30.0  # seconds; the other thread's move may itself wait for this one
_NOBODYS: _Key = (0, "")
_lock = Lock()  # a garbage collection may call `_let_go` at any time
# By the id of a class, which it holds: a metaclass may make its classes unhashable.
_of_classes: dict[int, tuple[type, Any, Any, weakref.WeakSet[_Kept]]] = {}


def keep(models: list[Any], pin: bool) -> None:
    """Start to keep host copies for ``models``.

    Args:
        models: modules.
        pin: keep them in pinned memory.

    Raises:
        MemoryError: there is not enough host memory; nothing has been changed.
    """
    missing = sum(slot.get().nbytes for model in models for slot in _slots(model) if _is_away(slot.get()))
    free = free_memory()
    if free is not None and missing > free:
        raise MemoryError(
            f"the weights on the device need {missing / 1e9:.1f} GB on the CPU, where {free / 1e9:.1f} GB are free; "
            "leave out keep_host_copies(), or use sequential or group offload"
        )
    for model in models:
        kept = _Kept(model, pin)
        weakref.finalize(kept, _let_go, type(model)).atexit = False
        with _lock.held:
            _intercept(type(model)).add(kept)
        vars(model)[_KEPT] = kept


def stop(models: list[Any]) -> None:
    """Drop the host copies of ``models``, and keep no more."""
    for model in models:
        vars(model).pop(_KEPT, None)


def _intercept(cls: type) -> weakref.WeakSet[_Kept]:
    """Wrap ``_apply`` of ``cls``. An instance attribute would be copied with the instance and could not tell which of
    them is moved.

    Returns:
        The `_Kept` objects of its instances.
    """
    if id(cls) not in _of_classes:
        own = attributes(cls).get(_METHOD)

        @functools.wraps(getattr(cls, _METHOD))
        def _apply(self: Any, fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
            # not always a function: what it is bound by is its own matter
            upstream = getattr(super(cls, self), _METHOD) if own is None else own.__get__(self, type(self))
            kept = vars(self).get(_KEPT)
            if not isinstance(kept, _Kept) or kept.module() is not self:
                return upstream(fn, *args, **kwargs)
            return kept.move(functools.partial(upstream, fn, *args, **kwargs), fn)

        # In this order: in a child forked in between, the wrapper may be missing but is never applied twice.
        _of_classes[id(cls)] = cls, _apply, own, weakref.WeakSet()
        setattr(cls, _METHOD, _apply)
    return _of_classes[id(cls)][3]


def _let_go(cls: type) -> None:
    """Restore ``cls`` once none of its instances has copies."""
    with _lock.held:
        _, function, own, kept = _of_classes.get(id(cls), (None, None, None, ()))
        if function is None or list(kept) or attributes(cls).get(_METHOD) is not function:
            return
        if own is None:
            delattr(cls, _METHOD)
        else:
            setattr(cls, _METHOD, own)
        del _of_classes[id(cls)]


class _Slot:
    """A place of a tensor in a module: a parameter's data, a buffer, a weight's companion or inner tensor.

    Attributes:
        key: identifies the place; the same before and after a move.
        wrapper: the parameter whose inner tensor it is, or None.
    """

    def __init__(self, key: _Key, parameter: Any, holder: Any, attribute: str, wrapper: Any = None) -> None:
        self.key = key
        self.wrapper = wrapper
        self._parameter, self._holder, self._attribute = parameter, holder, attribute

    def get(self) -> torch.Tensor:
        if self._parameter is not None:
            return self._parameter.data
        if isinstance(self._holder, dict):
            return self._holder[self._attribute]
        return getattr(self._holder, self._attribute)

    def put(self, tensor: torch.Tensor) -> None:
        if self._parameter is not None:
            self._parameter.data = tensor
        elif isinstance(self._holder, dict):
            self._holder[self._attribute] = tensor
        else:
            setattr(self._holder, self._attribute, tensor)


_Pinned = tuple[_Slot, torch.Tensor, torch.Tensor]  # with its pinned tensor and its own


class _Copy:
    """The host copy of one weight that is on a device, and the checksum of both after the move."""

    def __init__(self, tensor: torch.Tensor, checksum: int) -> None:
        self.tensor = tensor
        self.checksum = checksum


class _Kept:
    """The host copies of one module. `audit` finds them, and `release` frees them.

    Attributes:
        module: a weak reference to the module. A shallow copy of the module has this object too, but moves as upstream.
        copies: the host copies of the weights that are on a device.
    """

    def __init__(self, module: Any, pin: bool) -> None:
        self.module: Any = weakref.ref(module)
        self._pin = pin
        self.copies: dict[_Key, _Copy] = {}
        self._turn = Lock()
        self._moves = False
        # Checksums of CPU memory, computed on the CPU once, since that takes as long as a copy.
        self._checksums: dict[_Key, tuple[StorageWeakRef, int]] = {}

    def move(self, upstream: Callable[[], Any], fn: Callable[[Any], Any]) -> Any:
        """Call ``upstream``, which applies ``fn`` to each tensor of the module, and return its result.

        Only that is done for a function of the program's, which may not be called once more than it expects, within its
        dispatch modes, which see each operation, and within a move of the same module. Moves in several threads take
        turns: torch may not copy a tensor while its data is exchanged.
        """

        def work(taken: bool) -> Any:
            if not taken or self._moves or not _is_torchs(fn) or torch._C._len_torch_dispatch_stack():
                return upstream()
            return self._move(upstream, fn)

        return self._turn.run(work, within=_PATIENCE)

    def _move(self, upstream: Callable[[], Any], fn: Callable[[Any], Any]) -> Any:
        module = self.module()
        pinned: list[_Pinned] = []
        try:
            self._moves = True
            leaving: dict[_Key, torch.Tensor] = {}
            # Subclasses (GGUF) intercept even the assignment of ``.data``, and function modes see it.
            with _without_copies_if_short(), torch._C.DisableTorchFunction():
                leaving = self._prepare(module, fn, pinned)
            result = upstream()
            pinned.clear()
            with _without_copies_if_short(), torch._C.DisableTorchFunction():
                self._keep(module, leaving)
            return result
        except BaseException:
            with torch._C.DisableTorchFunction():
                for slot, here, tensor in pinned:  # what stays shares its memory as before
                    if slot.get().data_ptr() == here.data_ptr():
                        slot.put(tensor)
            raise
        finally:
            self._moves = False
            # Keep a copy only while its weight is on a device, even if the move failed midway.
            copies, self.copies = self.copies, {}
            with _without_copies_if_short(), torch._C.DisableTorchFunction():
                away = {slot.key for slot in _slots(module) if _is_away(slot.get())}
                self.copies = {key: copy for key, copy in copies.items() if key in away}

    def _prepare(
        self, module: Any, fn: Callable[[Any], Any], pinned: list[_Pinned]
    ) -> dict[_Key, torch.Tensor]:
        """Replace unchanged weights that ``fn`` would move to the CPU by their host copies.

        What it pins instead is added to ``pinned``.

        Returns:
            The tensors that ``fn`` will move from the CPU to a device.
        """
        slots = list(_slots(module))
        targets = {device: _target(fn, device) for device in {slot.get().device for slot in slots}}
        back = [slot for slot in slots if slot.key in self.copies and targets.get(slot.get().device) == CPU]
        if torch.__future__.get_overwrite_module_params_on_conversion():
            back = []  # each parameter is replaced then, and who has the old one keeps it as it is
        copies = {key: copy.tensor for key, copy in self.copies.items()}
        checksums = _checksums(back, copies)
        unchanged = [slot for slot, checksum in checksums if checksum == self.copies[slot.key].checksum]
        there = {slot.key: slot.get() for slot in unchanged}
        here = {key: copies[key] for key in there}
        apart = _shared_no_more(here, there) | _shared_no_more(there, here)
        unchanged = [
            slot
            for slot in unchanged
            # Not an inference tensor for a normal one: who has its parameter may want gradients.
            if slot.key not in apart and (there[slot.key].is_inference() or not here[slot.key].is_inference())
        ]
        whole = _without_parts(unchanged, slots)
        wrappers = {id(slot.wrapper): slot.wrapper for slot in whole if slot.wrapper is not None}
        try:
            for slot in whole:
                slot.put(self.copies[slot.key].tensor)
        finally:  # also where Ctrl-C comes in between: torch cannot move a wrapper that says another device
            for wrapper in wrappers.values():
                follow(wrapper)
        if targets.get(CPU) in (CPU, None):
            return {}
        leaving = [slot for slot in slots if slot.get().device == CPU]
        if self._pin and set(accelerator_types()) - {"mps"}:  # which has no separate memory
            _pin(leaving, pinned)
        # Detached, not the buffer itself: the module drops that, and if it stays alive, other code has it.
        return {slot.key: slot.get().detach() for slot in leaving if not slot.get().requires_grad}

    def _keep(self, module: Any, left: dict[_Key, torch.Tensor]) -> None:
        """Keep those tensors of ``left``, moved from the CPU, whose content is the same on the device."""
        arrived = [slot for slot in _slots(module) if slot.key in left]
        there = {slot.key: slot.get() for slot in arrived}
        gone = {key: left[key] for key in there}
        shared = _held_by_others(left) | _shared_no_more(gone, there) | _of_other_processes(gone)
        arrived = [slot for slot in arrived if slot.key not in shared]
        own = _OwnMemory(memory for memory, _ in self._checksums.values())
        for slot, checksum in _checksums(arrived, left):
            tensor = own.of(left[slot.key])
            if tensor is None:
                continue
            memory = StorageWeakRef(tensor.untyped_storage())
            if self._checksums.get(slot.key) != (memory, checksum):
                # New, changed on the CPU, or also cast by the move.
                here = fingerprint(tensor, random_numbers(CPU))
                if here is None or int(here) != checksum:
                    continue
                self._checksums[slot.key] = memory, checksum
            self.copies[slot.key] = _Copy(tensor, checksum)

    # A deep copy or a pickle of the module has no copies.
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        # Every file of a module has one, and ``torch.load(weights_only=True)`` knows it.
        return OrderedDict, ()


class _OwnMemory:
    """Copies of what is mapped from a file: who writes to the file would change the weights, who shortens it would end
    the process.

    Args:
        known: memory that is no file's.
    """

    def __init__(self, known: Iterable[StorageWeakRef]) -> None:
        self._known = {memory.cdata for memory in known if not memory.expired()}
        self._files: MappedFiles | None = None
        self._copies: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor, or one like it in memory that is no file's; None if there is no room, or if it is a small part of
        its memory."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._known or not storage.nbytes():
            return tensor
        self._files = self._files or MappedFiles()
        if not self._files.hold(storage.data_ptr()):
            return tensor
        if place not in self._copies:
            if storage.nbytes() > 2 * tensor.nbytes or not has_room(storage.nbytes()):
                return None
            self._copies[place] = storage.clone()
        like = torch.empty(0, dtype=tensor.dtype, device=CPU)
        return like.set_(self._copies[place], tensor.storage_offset(), tensor.shape, tensor.stride())


@contextlib.contextmanager
def _without_copies_if_short() -> Iterator[None]:
    """Ends the block if memory is short, also that which can be pinned: upstream moves and copies the weights then."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        heed_interruption(error)


def _slots(module: Any) -> Iterator[_Slot]:
    """Yield the places of ``module`` and its submodules, each once, without those of unknown tensor subclasses."""
    for part in modules_of(module):
        for name, parameter in part._parameters.items():
            if parameter is not None and is_wrapper(parameter):
                for index, (holder, attribute) in enumerate(inner_places(parameter)):
                    yield _Slot((id(part), f"{name}.{index}.{attribute}"), None, holder, attribute, parameter)
            elif parameter is not None and _is_plain(parameter):
                yield _Slot((id(part), name), parameter, None, name)
        for name, buffer in part._buffers.items():
            if buffer is not None and _is_plain(buffer):
                yield _Slot((id(part), name), None, part._buffers, name)
        for found in companions(part):
            # The first forward pass of an 8-bit layer moves CB and SCB from its weight to its state.
            name = (
                found.name.replace("state.", "weight.", 1) if found.name.startswith("state.") else found.name
            )
            yield _Slot((id(part), name), None, found.holder, found.attribute)


def _without_parts(slots: list[_Slot], every: list[_Slot]) -> list[_Slot]:
    """``slots`` without those of wrappers that have to be copied.

    These are wrappers with another inner tensor that is not in ``slots``, and wrappers in an autograd graph: torch
    cannot swap them once they have the data of another device.
    """
    chosen = {slot.key for slot in slots}
    copied = {
        id(slot.wrapper)
        for slot in every
        if slot.wrapper is not None and (slot.key not in chosen or _is_in_a_graph(slot.wrapper))
    }
    return [slot for slot in slots if id(slot.wrapper) not in copied]


def _is_in_a_graph(wrapper: Any) -> bool:
    return bool(wrapper.requires_grad) and (not hasattr(wrapper, "_use_count") or wrapper._use_count() > 1)


def _held_by_others(left: dict[_Key, torch.Tensor]) -> set[_Key]:
    """The keys of tensors whose memory other code has too (a state dict, a storage): if such a tensor came back into
    the module, a change of one would change the other."""
    tensors = {**left, _NOBODYS: torch.empty(1, device=CPU)}
    storages = {key: tensor.untyped_storage() for key, tensor in tensors.items()}
    own = Counter(storage._cdata for storage in storages.values())
    # A storage has one Python object; its referrers do not count as users of the memory.
    references = {key: sys.getrefcount(storage) - own[storage._cdata] for key, storage in storages.items()}
    return {
        key
        for key, storage in storages.items()
        # Plus one for `storage`.
        if torch._C._storage_Use_Count(storage._cdata) > own[storage._cdata] + 1
        or references[key] > references[_NOBODYS]
    }


def _shared_no_more(before: dict[_Key, torch.Tensor], now: dict[_Key, torch.Tensor]) -> set[_Key]:
    """The keys of tensors that have the same memory as others before a move, and not now."""
    places: dict[int, set[tuple[Any, int]]] = {}
    memory = {key: tensor.untyped_storage()._cdata for key, tensor in before.items()}
    for key, tensor in now.items():
        # The memory now, and where it would begin if it were that of the whole storage before.
        place = tensor.untyped_storage()._cdata, tensor.storage_offset() - before[key].storage_offset()
        places.setdefault(memory[key], set()).add(place)
    return {key for key, storage in memory.items() if len(places[storage]) > 1}


def _of_other_processes(tensors: dict[_Key, torch.Tensor]) -> set[_Key]:
    """The keys of tensors in shared memory."""
    return {key for key, tensor in tensors.items() if tensor.untyped_storage().is_shared()}


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and not hasattr(type(tensor), "__tensor_flatten__")
        and not isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
    )


def _is_away(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _is_torchs(fn: Callable[[Any], Any]) -> bool:
    """Whether torch itself made the function that moves tensors, as in ``Module.to``: it only moves and casts."""
    return bool(str(getattr(fn, "__module__", "")).partition(".")[0] == torch.__name__)


def _target(fn: Callable[[Any], Any], device: torch.device) -> torch.device | None:
    """The device to which ``fn`` moves a tensor that is on ``device``; None if unknown."""
    try:
        return torch.device(fn(torch.empty(0, device=device)).device)
    except Exception as error:
        heed_interruption(error)
        return None


def _pin(slots: list[_Slot], pinned: list[_Pinned]) -> None:
    here: dict[tuple[Any, ...], torch.Tensor] = {}  # a weight and its CB are often the same
    for slot in slots:
        tensor = slot.get()
        if tensor.numel() and not tensor.is_pinned():
            what = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if what not in here:
                here[what] = tensor.pin_memory()
            pinned.append((slot, here[what], tensor))
            slot.put(here[what])


def _checksums(slots: list[_Slot], copies: dict[_Key, torch.Tensor]) -> Iterator[tuple[_Slot, int]]:
    """Yield the slots whose tensor is on a device and has the form of its copy, each with its checksum."""
    by_device: dict[torch.device, list[tuple[_Slot, torch.Tensor]]] = {}
    for slot in slots:
        there, here = slot.get(), copies[slot.key]
        if _is_away(there) and _form(there) == _form(here):
            by_device.setdefault(there.device, []).append((slot, there))
    for device, pairs in by_device.items():
        # If the device lacks the memory to compute checksums, its weights are copied.
        answers: list[int] = []
        known: list[tuple[_Slot, torch.Tensor]] = []
        try:
            numbers = random_numbers(device)
            sums = [fingerprint(tensor, numbers) for _, tensor in pairs]
            known = [(slot, one) for (slot, _), one in zip(pairs, sums, strict=True) if one is not None]
            if known:  # all at once: each read would synchronize
                answers = torch.stack([one for _, one in known]).tolist()
        except RuntimeError as error:
            heed_interruption(error)
            continue
        yield from zip([slot for slot, _ in known], answers, strict=True)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
