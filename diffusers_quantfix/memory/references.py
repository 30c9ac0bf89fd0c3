"""Which tensors something outside of torch and Python can still reach: by counting references.

A NumPy array, a DLPack capsule, a memoryview of one or a C++ object reads a tensor's memory at its address. Freed, the
memory is the next tensor's, and they would read it or overwrite it. No list of such exporters is complete, so all
references are counted instead. Every exporter that keeps what it reads alive has a reference to the tensor's Python
object, to its C++ object or to its storage. Three counts have to come out even:

- of the Python object: ``sys.getrefcount`` against the references that the garbage collector can see, and the
  variables of running functions;
- of the C++ object: ``Tensor._use_count`` against views of it, and the nodes of autograd graphs;
- of the storage: its use count against the tensors on it.

What is left over is somebody's who cannot be asked. A call in another thread that computes with the tensor right now
has a reference, too.

Some see an address without a reference that could be counted. Noticed as well: a live torch tensor on the same memory
(``torch.frombuffer`` of an address), a ctypes array, structure or pointer at an address in it, an object with a
reference and such an address as a number (Numba) or in its own ``__array_interface__``, or of another package's
extension type (CuPy), and a captured graph of CUDA or XPU, which does not tell what it reads: all memory of devices is
left.

Proved on the libraries themselves are NumPy, DLPack, memoryview, ctypes, storages, autograd and other threads. The
rules for Numba, CuPy and captured graphs follow from the interfaces of these only, and were never run with them: the
tests have an object of Numba's shape and one of a captured graph, and nothing of CuPy's.

Not noticed is an address kept as a plain number by itself (``data_ptr()``, ``ctypes.c_void_p``), or in C or C++
without a reference.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import gc
import importlib.machinery
import itertools
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..placement.tensors import storage_of
from .census import Census
from .frames import locals_of, running

__all__ = ["Ranges", "References", "addresses_of"]

_FEW = 32  # that many can be asked for by gc.get_referrers, which is fast and compares with each
_CHUNK = 1000
_INTERFACES = ("__cuda_array_interface__", "__array_interface__", "__array_struct__", "__cuda_memory__")


class Ranges:
    """The addresses of storages."""

    def __init__(self, storages: dict[int, Any]) -> None:
        spans = []
        for key, storage in storages.items():
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a device without addresses
                if start := storage.data_ptr():
                    spans.append((start, start + storage.nbytes(), key))
        spans.sort()
        self._starts = [start for start, _, _ in spans]
        self._ends = [end for _, end, _ in spans]
        self._keys = [key for _, _, key in spans]
        self.first = self._starts[0] if spans else 0
        self.last = max(self._ends, default=0)

    def find(self, address: int) -> int | None:
        """The key of the storage that ``address`` is in."""
        if not self.first <= address < self.last:
            return None
        at = bisect.bisect_right(self._starts, address) - 1
        return self._keys[at] if address < self._ends[at] else None

    def meets(self, start: int, size: int) -> bool:
        """Whether ``size`` bytes from ``start`` have memory in common with any of the storages."""
        at = bisect.bisect_right(self._starts, start)
        return (at > 0 and start < self._ends[at - 1]) or (
            at < len(self._starts) and self._starts[at] < start + size
        )

    def overlapping(self, start: int, size: int) -> Iterator[int]:
        """The keys of the storages that ``size`` bytes from ``start`` have memory in common with."""
        if (key := self.find(start)) is not None:
            yield key
        at = bisect.bisect_right(self._starts, start)
        while at < len(self._starts) and self._starts[at] < start + size:
            yield self._keys[at]
            at += 1


class References:
    """The tensors on some storages, and which of them, and of the storages, cannot be emptied.

    Attributes:
        tensors: every tensor on them, those that were met in autograd graphs only included.
        keys: ``id`` of a tensor -> key of its storage.
        outside: ``id`` of the tensors that something outside can reach.
        spared: key of a storage -> why nothing on it can be emptied.
        hidden: key of a storage -> references to it by something that is no known tensor.
    """

    def __init__(self, census: Census, storages: dict[int, Any], modules: Iterable[Any]) -> None:
        """Look; nothing is changed.

        Args:
            census: of now. Its tensors are given up.
            storages: by their ``_cdata``. There may be no other references to them but in this dict.
            modules: what is released: the first place to look for references.
        """
        self._storages = storages
        self._ranges = Ranges(storages)
        self.spared: dict[int, str] = {}
        self.keys: dict[int, int] = {}
        self.tensors = self._on_storages(census.tensors)
        roots = [*census.nodes, *_grad_fns(census.tensors)]
        census.tensors.clear()
        for value in census.addresses:
            for address, size in addresses_of(value):
                for key in self._ranges.overlapping(address, size):
                    self.spared[key] = "a ctypes object has its address"
        self._spare_for_graphs(census.graphs)

        known: Counter[int] = Counter()  # references to C++ objects
        saved: Counter[int] = Counter()  # references to storages by copies in autograd graphs
        self._count_views(self.tensors, known)
        # From here on `tensors` grows only by what the graphs hand out.
        self.outside, self.hidden = self._unknown(known), self._hidden(saved)
        if self.outside or self.hidden:
            self._count_graphs(roots, known, saved)
            self.outside, self.hidden = self._unknown(known), self._hidden(saved)
        del roots
        self.outside |= self._python_references(modules)

    def reachable(self, key: int) -> bool:
        """Whether something outside has a reference to the Python object of a storage."""
        storages = self._storages
        visible, owners = self._visible([storages[key]], {id(storages)})
        own = _own_reference(torch.UntypedStorage) if _use_count(storages[key]) > 1 else 0
        least = {key: torch.UntypedStorage(1)}
        count = sys.getrefcount(storages[key]) - sys.getrefcount(least[key]) - own
        return id(storages[key]) in owners or count > visible[id(storages[key])]

    def _on_storages(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        found = []
        meets = self._ranges.meets
        for tensor in tensors:
            try:
                address = torch._C._data_address(tensor)
            except Exception:  # no plain memory: a sparse, fake or functional tensor
                address = 0
            if address and not meets(address, tensor.numel() * tensor.element_size()):
                continue
            storage = storage_of(tensor)
            if storage is None:
                continue
            if storage._cdata in self._storages:
                found.append(tensor)
                self.keys[id(tensor)] = storage._cdata
            elif address:
                for key in self._ranges.overlapping(storage.data_ptr(), storage.nbytes()):
                    self.spared[key] = f"a tensor {list(tensor.shape)} of another storage is on its memory"
        return found

    def _spare_for_graphs(self, graphs: list[Any]) -> None:
        for graph in graphs:
            try:
                graph.pool()
            except Exception:  # nothing captured, or reset
                continue
            for key, storage in self._storages.items():
                if storage.device.type != "cpu":
                    self.spared[key] = "a captured graph may read it (its reset() gives it up)"

    def _count_views(self, tensors: Iterable[torch.Tensor], known: Counter[int]) -> None:
        """Each view has a reference to its base."""
        pending = list(tensors)
        while pending:
            tensor = pending.pop()
            base = tensor._base if tensor._is_view() else None
            if base is not None:
                known[id(base)] += 1
                if self._add(base):
                    pending.append(base)

    def _count_graphs(self, roots: list[Any], known: Counter[int], saved: Counter[int]) -> None:
        """The references that the autograd graphs of ``roots`` have: to leaves, and to what was saved for backward."""
        nodes: dict[int, Any] = {}
        pending = [root for root in roots if root is not None]
        while pending:
            node = pending.pop()
            if id(node) in nodes:
                continue
            nodes[id(node)] = node
            pending += [following for following, _ in node.next_functions if following is not None]
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor):
                known[id(leaf)] += 1
                self._add(leaf)
            for first, second in _saved(node):
                if first is second:
                    known[id(first)] += 1
                    if self._add(first):
                        self._count_views([first], known)
                elif (storage := storage_of(first)) is not None:
                    # Made anew each time, of a copy that has the storage.
                    saved[storage._cdata] += 1

    def _add(self, tensor: torch.Tensor) -> bool:
        """Take one more tensor in; False if it is on other memory, or in already."""
        if id(tensor) in self.keys:
            return False
        storage = storage_of(tensor)
        if storage is None or storage._cdata not in self._storages:
            return False
        self.keys[id(tensor)] = storage._cdata
        self.tensors.append(tensor)
        return True

    def _unknown(self, known: Counter[int]) -> set[int]:
        # Not known[...]: a Counter asks a function of Python for each key that it does not have.
        return {id(tensor) for tensor in self.tensors if tensor._use_count() - 1 > known.get(id(tensor), 0)}

    def _hidden(self, saved: Counter[int]) -> dict[int, int]:
        on = Counter(self.keys.values())
        # One more reference is that of the Python object, which is in the dict.
        left = {
            key: _use_count(item) - 1 - on.get(key, 0) - saved.get(key, 0)
            for key, item in self._storages.items()
        }
        return {key: count for key, count in left.items() if count > 0}

    def _python_references(self, modules: Iterable[Any]) -> set[int]:
        places = {id(named): named for module in modules for named in (module._parameters, module._buffers)}
        known = Counter(map(id, itertools.chain.from_iterable(named.values() for named in places.values())))
        del places
        counts = self._refcounts()
        suspects = [
            tensor for tensor, count in zip(self.tensors, counts, strict=True) if count > known[id(tensor)]
        ]
        if not suspects:
            return set()
        visible, owners = self._visible(suspects, {id(suspects), id(self.tensors)})
        ids = set(map(id, suspects))
        suspects.clear()
        counts = self._refcounts()
        return owners | {
            id(tensor)
            for tensor, count in zip(self.tensors, counts, strict=True)
            if id(tensor) in ids and count > visible[id(tensor)]
        }

    def _refcounts(self) -> list[int]:
        """Of each of `tensors` the references to its Python object, but for those of `tensors` and of torch."""
        self.tensors.append(torch.empty(0))  # it has the fewest that are possible here
        counts = list(map(sys.getrefcount, self.tensors))
        self.tensors.pop()
        least = counts.pop()
        own = _own_reference(torch.Tensor)
        return [
            count - least - (own if tensor._use_count() > 1 else 0)
            for tensor, count in zip(self.tensors, counts, strict=True)
        ]

    def _visible(self, values: list[Any], ours: set[int]) -> tuple[Counter[int], set[int]]:
        """How many references to each of ``values`` can be seen, and ``id`` of those whose owner reads by address."""
        wanted = set(map(id, values))
        counts: Counter[int] = Counter()
        owners: set[int] = set()
        for referrer in _referrers(values, wanted):
            if id(referrer) in ours:
                continue
            met = [id(item) for item in gc.get_referents(referrer) if id(item) in wanted]
            counts.update(met)
            if self._reads_by_address(referrer):
                owners.update(met)
        for frame, variables in _running_locals():
            met = [id(item) for item in variables if id(item) in wanted]
            if met:
                # Where a frame is itself walked by the garbage collector (3.10), that has been counted.
                seen = Counter(id(item) for item in gc.get_referents(frame))
                counts.update({item: count for item, count in Counter(met).items() if not seen[item]})
        return counts, owners

    def _reads_by_address(self, referrer: Any) -> bool:
        kind = type(referrer)
        if isinstance(referrer, (types.FrameType, types.FunctionType, types.CellType, types.GeneratorType)):
            return False
        if isinstance(referrer, (torch.Tensor, torch.nn.Module)):
            return False
        if any(hasattr(kind, name) for name in _INTERFACES) or _is_foreign(kind):
            return True
        items = list(referrer.values()) if isinstance(referrer, dict) else gc.get_referents(referrer)
        return any(self._has_address(item) for item in items)

    def _has_address(self, value: Any, deeper: int = 2) -> bool:
        """Whether ``value`` is an address in one of the storages, or a small container with one."""
        kind = type(value)
        if kind in (tuple, list, dict):
            items = list(value.values()) if kind is dict else value
            return (
                bool(deeper) and len(items) <= _FEW and any(self._has_address(i, deeper - 1) for i in items)
            )
        if kind is ctypes.c_void_p:
            value = value.value
        elif kind.__module__ == "numpy" and hasattr(kind, "__index__") and not hasattr(kind, "__len__"):
            value = int(value)
        return type(value) is int and self._ranges.find(value) is not None


def _grad_fns(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    for tensor in tensors:
        # Both make the node of a view anew whose base was changed, which fails where that is empty by now.
        try:
            if not tensor.is_leaf:
                yield tensor.grad_fn
        except RuntimeError:
            continue


def _referrers(values: list[Any], wanted: set[int]) -> Iterable[Any]:
    if len(values) <= _FEW:
        return gc.get_referrers(*values)
    found = []
    objects = gc.get_objects()
    for start in range(0, len(objects), _CHUNK):
        chunk = objects[start : start + _CHUNK]
        if not wanted.isdisjoint(map(id, gc.get_referents(*chunk))):
            found += [item for item in chunk if not wanted.isdisjoint(map(id, gc.get_referents(item)))]
    return found


def _running_locals() -> Iterator[tuple[types.FrameType, list[Any]]]:
    """The variables of running functions.

    Not those of the innermost function of another thread: it may be in a call that uses them right now. From Python
    3.14 on such a call has no references of its own.
    """
    for ident, chain in running(ours=True).items():
        for frame in chain if ident == threading.get_ident() else chain[1:]:
            code = frame.f_code
            own = set(code.co_varnames) - set(code.co_cellvars)  # a cell is seen by the garbage collector
            yield frame, [value for name, value in locals_of(frame).items() if name in own]


def _saved(node: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor that ``node`` saved for backward, asked for twice; those with a hook are not unpacked."""
    for name in _saved_names(type(node)):
        try:
            raw = getattr(node, name, None)
        except RuntimeError:  # freed by a backward pass
            continue
        raws = raw if isinstance(raw, (tuple, list)) else [raw]
        for item in raws:
            # Without the attribute (older torch) a hook cannot be told from none, and a hook may compute anything.
            if item is None or getattr(item, "unpack_hook", item) is not None:
                continue
            with contextlib.suppress(RuntimeError):  # freed, or changed since
                first, second = item.unpack(), item.unpack()
                if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
                    yield first, second


_names: dict[type, tuple[str, ...]] = {}


def _saved_names(kind: type) -> tuple[str, ...]:
    if kind not in _names:
        _names[kind] = tuple([name for name in dir(kind) if name.startswith("_raw_saved_")])
    return _names[kind]


def addresses_of(value: Any) -> Iterator[tuple[int, int]]:
    """What memory a ctypes object is, and what it points to."""
    with contextlib.suppress(Exception):
        yield ctypes.addressof(value), max(ctypes.sizeof(value), 1)
    with contextlib.suppress(Exception):
        # Not the value of a c_void_p: it is a number, and may be that of memory that is long gone.
        if isinstance(value, ctypes._Pointer) and value:
            yield ctypes.addressof(value.contents), 1


_foreign: dict[type, bool] = {}


def _is_foreign(kind: type) -> bool:
    """Whether ``kind`` is made by another package's extension module: what it does with an address is unknown."""
    if kind not in _foreign:
        _foreign[kind] = any(
            cls.__module__.partition(".")[0] not in ("torch", "builtins", *sys.stdlib_module_names)
            and str(getattr(sys.modules.get(cls.__module__), "__file__", None)).endswith(
                tuple(importlib.machinery.EXTENSION_SUFFIXES)
            )
            for cls in kind.__mro__
        )
    return _foreign[kind]


def _use_count(storage: Any) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


@functools.cache
def _own_reference(kind: type) -> int:
    """How many references this torch itself has to a Python object while C++ has more than that object's own."""
    value: Any = torch.empty(1)
    if kind is torch.Tensor:
        before = sys.getrefcount(value)
        view = value.view(1)  # it has its base
        own = sys.getrefcount(value) - before
        del view
        return own
    storage = value.untyped_storage()
    before = sys.getrefcount(storage)
    del value
    return before - sys.getrefcount(storage)
