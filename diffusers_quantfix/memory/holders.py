"""What holds a tensor: a chain of referrers that a person can follow, from the tensor up to a variable."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..placement.tensors import storage_of
from .census import all_but_plain
from .emptying import storage_in
from .frames import is_ours, locals_of, running
from .references import Ranges, addresses_of

if TYPE_CHECKING:
    from .emptying import Block

__all__ = ["held", "holders", "holders_of_storages"]

_WIDTH = 12  # so many referrers are followed from each level to the next, those that were met first
_STEPS = 4  # of a long chain: so many at the tensor, and so many at the variable
_LEAST = 3  # levels at any rate: a weight, its dict, the module's __dict__, the module
_CHUNK = 1000
_TENSOR, _ARRAY, _CAPSULE, _CTYPES, _CONTAINER = range(1, 6)
_UNSEEN = "something that Python cannot see"
_CUT = " (search cut)"


@dataclass(eq=False)
class _Node:
    """An object that holds the one before it, and the steps of the chain so far."""

    value: Any
    steps: tuple[str, ...]
    origin: int
    key: str = ""  # of a dict: the text of the key, until it is known whose attributes they are


class _Found:
    """The chains of one value: those up to a variable, and the best of the rest."""

    def __init__(self) -> None:
        self.chains: list[str] = []
        self.sure = False  # one of them is alive without doubt: a traceback, and its frames, may be garbage
        self.owner: tuple[str, ...] = ()  # up to an attribute of an object
        self.last: tuple[str, ...] = ()

    def answer(self, most: int, cut: bool) -> list[str]:
        """Up to ``most`` chains; without one up to a variable, the nearest owner."""
        chains = list(dict.fromkeys(self.chains))[:most]
        if not chains and (self.owner or self.last):
            chains = [_text(self.owner or self.last) + (_CUT if cut else "")]
        return chains


def holders(values: list[Any], until: float, most: int = 3) -> list[list[str]]:
    """For each of ``values`` up to ``most`` chains of what holds it, the shortest first.

    A chain is read from the inside out: ``['x'] of a dict <- .cache of a Sampler <- global 'sampler' of __main__``,
    however long it is; of a long one the middle is left out. Empty if nothing in Python holds it.

    Args:
        values: searched together, since each level walks the whole heap.
        until: ``time.monotonic()`` after which no further level is begun, but for the first three. A chain that has met
            no variable by then ends with the nearest object that has it as an attribute, and with "(search cut)".
        most: chains of each.
    """
    found, cut = _search(values, until, most, frozenset())
    return [one.answer(most, cut) for one in found]


def held(values: list[Any], until: float, but: Set[int], most: int = 3) -> list[list[str]] | None:
    """As `holders`, if each of ``values`` is held by a variable that is alive without doubt; None otherwise.

    So none of them is garbage, which only a collection of the whole heap could tell otherwise.

    Args:
        values: as for `holders`.
        until: as for `holders`.
        but: ``id`` of objects that do not count, and neither does what holds a value through them.
        most: chains of each.
    """
    found, _ = _search(values, until, most, but)
    return [one.answer(most, cut=False) for one in found] if all(one.sure for one in found) else None


def _search(values: list[Any], until: float, most: int, but: Set[int]) -> tuple[list[_Found], bool]:
    """The chains, and whether the search was cut."""
    found = [_Found() for _ in values]
    frames = [frame for chain in running().values() for frame in chain]
    level = [_Node(value, (), origin) for origin, value in enumerate(values)]
    hidden = {id(values), id(frames), id(found), *but}
    seen = {(node.origin, id(node.value)) for node in level}
    # Their ids must not be given to other objects as long as `seen` has them.
    kept: list[Any] = [seen, level]
    hidden.add(id(kept))
    for depth in itertools.count():
        _meet_variables(level, frames, found)
        level = [node for node in level if len(found[node.origin].chains) < most]
        if not level or (depth >= _LEAST and time.monotonic() >= until):
            break
        level = _next_level(level, seen, hidden, found, frames)
        kept += [level, *[node.value for node in level]]
    return found, bool(level)


def holders_of_storages(blocks: list[Block], until: float, most: int = 3) -> list[list[str]]:
    """As `holders`, of what has the memory of ``blocks``: tensors, storages, and where something outside of torch has
    it, NumPy arrays, DLPack capsules and ctypes objects on it."""
    met: list[tuple[int, str, Any]] = []
    for index, block in enumerate(blocks):
        if block.tensor is not None:
            met.append((index, "", block.tensor))
            block.tensor = None
    alive = [storage_in(block) for block in blocks]
    known = {index for index, _, _ in met}
    by_key = {
        storage._cdata: index
        for index, storage in enumerate(alive)
        if storage is not None and index not in known
    }
    outside = {index for index, block in enumerate(blocks) if block.outside}
    if by_key:
        met += _on_memory(by_key, alive, outside, until)
    chosen: list[tuple[int, str, Any]] = []
    number: Counter[int] = Counter()
    one: Any
    for one in met:
        # One tensor is enough where nobody outside is at fault.
        if number[one[0]] < (most if one[0] in outside else 1):
            number[one[0]] += 1
            chosen.append(one)
    indices, prefixes = [index for index, _, _ in chosen], [what for _, what, _ in chosen]
    values = [value for _, _, value in chosen]
    met.clear()
    chosen.clear()
    one = None
    chains: list[list[str]] = [[] for _ in blocks]
    del alive, by_key
    for index, what, steps in zip(indices, prefixes, holders(values, until, most), strict=True):
        chains[index] += [f"{what} <- {step}" if what else step for step in steps] or ([what] if what else [])
    unseen = _UNSEEN + (_CUT if time.monotonic() >= until else "")
    return [list(dict.fromkeys(one))[:most] or [unseen] for one in chains]


def _on_memory(
    by_key: dict[int, int], alive: list[Any], outside: set[int], until: float
) -> list[tuple[int, str, Any]]:
    """(index of the block, what it is, the object) of objects on the memory, those from outside of torch first."""
    ranges = Ranges({index: alive[index] for index in outside if alive[index] is not None})
    found: list[tuple[int, str, Any]] = []
    tensors: list[tuple[int, str, Any]] = []
    kinds: dict[type, int] = {}
    seen: set[int] = set()

    def look(value: Any, kind: int) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if kind == _TENSOR:
            storage = storage_of(value)
            index = by_key.get(storage._cdata) if storage is not None else None
            if index is not None:
                tensors.append((index, "", value))
                return
        for address in _addresses(value, kind):
            if (index := ranges.find(address)) is not None:
                found.append((index, _described(value, kind), value))
                return

    def look_inside(value: Any, top: Any, path: str) -> None:
        # A dict or tuple of such objects only is unknown to the garbage collector, too.
        if gc.is_tracked(value) or id(value) in seen or not value:
            return
        seen.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            inner = f"[{_key(key)}] of a {type(value).__name__}{path}"
            kind = exporters.get(type(item), 0)
            if kind == _CONTAINER:
                look_inside(item, top, f" <- {inner}")
            elif kind:
                look(item, kind)
                if found and found[-1][2] is item:
                    found[-1] = (found[-1][0], f"{found[-1][1]} <- {inner}", top)

    exporters = _exporters() if outside else {}
    for chain in running().values():
        for frame in chain:
            for value in locals_of(frame).values():
                if exporters.get(type(value)) == _CONTAINER:
                    look_inside(value, value, "")
                if kind := _kind(type(value)):
                    look(value, kind)
    # Only those that may hold an array or a capsule have to be looked into.
    objects = gc.get_objects() if exporters else all_but_plain()
    for start in range(0, len(objects), _CHUNK):
        chunk = objects[start : start + _CHUNK]
        for value in chunk:
            kind = kinds.get(type(value), -1)
            if kind < 0:
                kind = kinds[type(value)] = _kind(type(value))
            if kind:
                look(value, kind)
        # An array or a capsule is no object of the garbage collector's, but what holds it is.
        if exporters and time.monotonic() < until:
            for value in gc.get_referents(*chunk):
                kind = exporters.get(type(value), 0)
                if kind == _CONTAINER:
                    look_inside(value, value, "")
                elif kind:
                    look(value, kind)
    answer = found + tensors
    found.clear()  # the functions above are cycles: garbage that would be met as holders
    tensors.clear()
    return answer


def _exporters() -> dict[type, int]:
    """The types of objects that the garbage collector may not know."""
    from torch.utils.dlpack import to_dlpack

    found: dict[type, int] = {type(to_dlpack(torch.empty(1))): _CAPSULE, dict: _CONTAINER, tuple: _CONTAINER}
    pending = [sys.modules["numpy"].ndarray] if "numpy" in sys.modules else []
    while pending:
        kind = pending.pop()
        found[kind] = _ARRAY
        pending += kind.__subclasses__()
    return found


def _kind(kind: type) -> int:
    if issubclass(kind, torch.Tensor):
        return 0 if hasattr(kind, "__tensor_flatten__") else _TENSOR
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return _ARRAY
    if kind.__name__ == "PyCapsule":
        return 3
    return (
        4 if any(base.__module__ == "_ctypes" for base in kind.__mro__) and not issubclass(kind, type) else 0
    )


def _addresses(value: Any, kind: int) -> Iterator[int]:
    if kind == _TENSOR:
        with contextlib.suppress(Exception):  # no plain memory: a sparse, fake or functional tensor
            yield torch._C._data_address(value)
    elif kind == _ARRAY:
        yield int(value.__array_interface__["data"][0])
    elif kind == _CTYPES:
        yield from (address for address, _ in addresses_of(value))
    else:
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # The first field of a DLTensor is its address; a versioned one has 32 bytes before it.
        for name, skipped in ((b"dltensor", 0), (b"numpy_dltensor", 0), (b"dltensor_versioned", 32)):
            with contextlib.suppress(ValueError):  # a capsule of another name
                if place := get(value, name):
                    yield int(ctypes.c_uint64.from_address(place + skipped).value)


def _described(value: Any, kind: int) -> str:
    if kind == _ARRAY:
        return f"a NumPy array {value.dtype}{list(value.shape)}"
    if kind == _TENSOR:
        return f"a tensor {list(value.shape)} of another storage"
    return "a DLPack capsule" if kind == _CAPSULE else f"a ctypes {type(value).__name__}"


def _meet_variables(level: list[_Node], frames: list[types.FrameType], found: list[_Found]) -> None:
    """The variables of running functions that hold an object of ``level``."""
    by_id: dict[int, list[_Node]] = {}
    for node in level:
        by_id.setdefault(id(node.value), []).append(node)
    for frame in frames:
        for name, value in locals_of(frame).items():
            for node in by_id.get(id(value), ()):
                found[node.origin].chains.append(_text((*_closed(node), _local(frame, name))))
                found[node.origin].sure = True


def _next_level(
    level: list[_Node],
    seen: set[tuple[int, int]],
    hidden: set[int],
    found: list[_Found],
    frames: list[types.FrameType],
) -> list[_Node]:
    held: dict[int, list[_Node]] = {}
    for node in level:
        held.setdefault(id(node.value), []).append(node)
    above: list[_Node] = []
    referrers = gc.get_referrers(*[nodes[0].value for nodes in held.values()])
    hidden.update((id(level), id(held), id(above), id(referrers)))
    width: dict[int, int] = {}
    for referrer in referrers:
        if id(referrer) in hidden or _is_ours(referrer):
            continue
        for node in [node for item in gc.get_referents(referrer) for node in held.get(id(item), ())]:
            if (node.origin, id(referrer)) in seen:
                continue
            seen.add((node.origin, id(referrer)))
            one = found[node.origin]
            if isinstance(referrer, types.FrameType):
                names = [name for name, item in locals_of(referrer).items() if item is node.value]
                one.chains.append(_text((*_closed(node), _local(referrer, names[0] if names else "?"))))
                one.sure = one.sure or any(referrer is frame for frame in frames)
            elif isinstance(referrer, dict) and (module := _module_of(referrer)):
                step = f"global {_key_of(referrer, node.value)} of {module}"
                one.chains.append(_text((*_closed(node), step)))
                one.sure = True
            elif width.get(node.origin, 0) < _WIDTH:
                width[node.origin] = width.get(node.origin, 0) + 1
                above.append(_above(node, referrer))
                one.last = _closed(above[-1])
                if not one.owner and above[-1].steps and above[-1].steps[-1].startswith("."):
                    one.owner = above[-1].steps
    return above


def _above(node: _Node, referrer: Any) -> _Node:
    target = node.value
    if isinstance(referrer, dict):
        # It may be the __dict__ of an object: the next level knows.
        return _Node(referrer, _closed(node), node.origin, _key_of(referrer, target))
    if node.key and getattr(referrer, "__dict__", None) is target:
        return _Node(
            referrer, (*node.steps, f".{node.key.strip(chr(39))} of {_called(referrer)}"), node.origin
        )
    steps = _closed(node)
    if isinstance(referrer, (list, tuple)):
        index = next((i for i, item in enumerate(referrer) if item is target), 0)
        step = f"[{index}] of a {type(referrer).__name__}"
    elif isinstance(referrer, types.CellType):
        step = "a closure's variable"
    elif isinstance(referrer, types.FunctionType):
        step = f"function {referrer.__qualname__}"
    else:
        names = [name for name, item in list(getattr(referrer, "__dict__", {}).items()) if item is target]
        step = f".{names[0]} of {_called(referrer)}" if names else f"in {_called(referrer)}"
    return _Node(referrer, (*steps, step), node.origin)


def _closed(node: _Node) -> tuple[str, ...]:
    """The steps of ``node``; a dict that is nobody's ``__dict__`` is named as a dict."""
    return (*node.steps, f"[{node.key}] of a dict") if node.key else node.steps


def _text(steps: tuple[str, ...]) -> str:
    if len(steps) > 2 * _STEPS + 1:
        between = f"... {len(steps) - 2 * _STEPS} more ..."
        steps = (*steps[:_STEPS], between, *steps[-_STEPS:])
    return " <- ".join(steps)


def _local(frame: types.FrameType, name: str) -> str:
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name)  # Python 3.10 knows the short name only
    return f"local {name!r} of {function} ({Path(code.co_filename).name}:{frame.f_lineno})"


def _module_of(namespace: dict[Any, Any]) -> str:
    for name, module in sys.modules.copy().items():
        if getattr(module, "__dict__", None) is namespace:
            return name
    return ""


def _key_of(mapping: dict[Any, Any], target: Any) -> str:
    return _key(next((key for key, item in list(mapping.items()) if item is target), None))


def _key(key: Any) -> str:
    return repr(key)[:60] if isinstance(key, (str, int)) else "..."


def _is_ours(referrer: Any) -> bool:
    if isinstance(referrer, types.FrameType):
        return is_ours(referrer)
    return type(referrer).__module__.partition(".")[0] == __name__.partition(".")[0] or isinstance(
        referrer, types.GeneratorType
    )


def _called(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
