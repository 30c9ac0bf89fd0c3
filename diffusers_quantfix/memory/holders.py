"""What holds a tensor: a readable chain of referrers, from the tensor up to a variable.

The objects in it belong to other code, and another thread may still be constructing them: only their type and the
results of `gc` are used. Plain tuples are left out, see `objects_of`.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.classes import class_name, is_a, items_of, module_name, namespace, text_of
from ..engine.heap import objects_of
from ..placement.tensors import short, storage_of
from .census import Census
from .frames import NAMED, is_ours, place, running, users_functions, variables

if TYPE_CHECKING:
    from .emptying import Block

__all__ = ["holders", "holders_of_storages"]

_WIDTH = 12  # the number of referrers that are followed to the next level, those found first
_STEPS = 4  # the number of steps shown at each end of a long chain
_LEAST = 3  # levels that are always searched: a weight, its dict, the module's __dict__, the module
_SEARCHED = 24  # the most tensors: each level compares every object of the heap with each of them
_FUNCTIONS = 3
_CUT = " (search cut)"
_UNSEEN = "something that Python does not see"


@dataclass(eq=False, slots=True)
class _Node:
    """An object that holds the previous one, and the chain so far."""

    value: Any
    steps: tuple[str, ...]
    origin: int
    key: str = ""  # of a dict: the key's text, until its owner is known

    def closed(self) -> tuple[str, ...]:
        """The steps, with a dict that is no object's ``__dict__`` named as a dict."""
        return (*self.steps, f"[{self.key}] of a dict") if self.key else self.steps


class _Found:
    """The chains of one value: up to a variable, up to an object that Python does not see, and the best others."""

    def __init__(self) -> None:
        self.chains: list[str] = []
        self.unseen: list[str] = []
        self.owner: tuple[str, ...] = ()  # up to an attribute of an object
        self.last: tuple[str, ...] = ()

    def answer(self, most: int, cut: bool) -> list[str]:
        """Up to ``most`` chains; if none is complete, the chain to the nearest owner."""
        chains = list(dict.fromkeys(self.chains + self.unseen))[:most]
        if not chains and (self.owner or self.last):
            chains = [_text(self.owner or self.last) + (_CUT if cut else "")]
        return chains


def holders_of_storages(blocks: list[Block], until: float, most: int = 3) -> list[list[str]]:
    """As `holders`, for the tensors in the memory of ``blocks``; only the first few blocks are searched."""
    keys = {block.weak.cdata: index for index, block in enumerate(blocks[:_SEARCHED])}
    number = [0] * len(blocks)
    values: list[Any] = []
    origins: list[int] = []
    tensor: Any = None
    for tensor in Census().tensors:
        storage = storage_of(tensor)
        index = keys.get(storage._cdata) if storage is not None else None
        if index is not None and number[index] < most and len(values) < _SEARCHED:
            number[index] += 1
            values.append(tensor)
            origins.append(index)
    tensor = storage = None
    chains: list[list[str]] = [[] for _ in blocks]
    for index, found in zip(origins, holders(values, until, most), strict=True):
        chains[index] += found
    for index in range(len(keys)):
        seen = sorted(dict.fromkeys(chains[index]), key=lambda chain: chain.endswith(_UNSEEN))
        chains[index] = seen[:most] or [_unseen()]
    return chains


def holders(values: list[Any], until: float, most: int = 3) -> list[list[str]]:
    """For each of ``values``, up to ``most`` chains of what holds it, the shortest first.

    A chain is read from the inside out: ``['x'] of a dict <- .cache of a Sampler <- global 'sampler' of __main__``. The
    middle of a long chain is left out.

    Args:
        values: the objects; they are searched together, since each level walks the whole heap.
        until: the ``time.monotonic()`` after which no level begins, except the first three. A chain that has not
            reached a variable by then ends at the nearest object that has it as an attribute, with "(search cut)".
        most: the number of chains per value.
    """
    search = _Search(values, most)
    cut = search.run(until)
    return [one.answer(most, cut) for one in search.found]


class _Search:
    def __init__(self, values: list[Any], most: int) -> None:
        self.found = [_Found() for _ in values]
        self._most = most
        self._level = [_Node(value, (), origin) for origin, value in enumerate(values)]
        self._frames = [frame for chain in running().values() for frame in chain]
        self._modules = _modules()
        self._errors: dict[int, BaseException] | None = None
        self._seen = {(node.origin, id(node.value)) for node in self._level}
        # Kept alive so that the ids in `_seen` are not reused.
        self._kept: list[Any] = [self._level]
        self._hidden = {id(values), id(self._frames), id(self._level), id(self._kept), id(vars(self))}

    def run(self, until: float) -> bool:
        """Search, and return whether the search was cut."""
        for depth in itertools.count():
            self._meet_variables()
            self._level = [node for node in self._level if len(self.found[node.origin].chains) < self._most]
            self._hidden.add(id(self._level))
            if not self._level or (depth >= _LEAST and time.monotonic() >= until):
                break
            self._level = self._next_level()
            self._kept.append(self._level)
            self._hidden.add(id(self._level))
        return bool(self._level)

    def _meet_variables(self) -> None:
        """End the chains whose object is a global of a module or a variable of a running function."""
        by_id: dict[int, list[_Node]] = {}
        for node in self._level:
            by_id.setdefault(id(node.value), []).append(node)
        wanted = by_id.keys()
        for name, held in self._modules.values():
            if not wanted.isdisjoint(map(id, list(held.values()))):
                for key, value in items_of(held):
                    for node in by_id.get(id(value), ()):
                        self._end(node, f"global {short(key)} of {name}")
        for frame in self._frames:
            for name, value in variables(frame):
                for node in by_id.get(id(value), ()):
                    self._end(node, f"local {name!r} of {place(frame)}")

    def _end(self, node: _Node, step: str) -> None:
        self.found[node.origin].chains.append(_text((*node.closed(), step)))

    def _next_level(self) -> list[_Node]:
        held: dict[int, list[_Node]] = {}
        for node in self._level:
            held.setdefault(id(node.value), []).append(node)
        above: list[_Node] = []
        referrers = objects_of(gc.get_referrers, *[nodes[0].value for nodes in held.values()])
        self._hidden.update((id(held), id(above), id(referrers)))
        width: dict[int, int] = {}
        met: set[int] = set()
        for referrer in referrers:
            if id(referrer) in self._hidden or id(referrer) in self._modules or _is_of_this_package(referrer):
                continue
            for node in [node for item in gc.get_referents(referrer) for node in held.get(id(item), ())]:
                met.add(id(node))
                if (node.origin, id(referrer)) in self._seen:
                    continue
                self._seen.add((node.origin, id(referrer)))
                one = self.found[node.origin]
                if is_a(referrer, types.FrameType) and any(referrer is frame for frame in self._frames):
                    self._end(node, f"a local of {place(referrer)}")  # a generator's, on Python 3.10
                elif width.get(node.origin, 0) < _WIDTH:
                    width[node.origin] = width.get(node.origin, 0) + 1
                    following = self._above(node, referrer)
                    above.append(following)
                    one.last = following.closed()
                    if not one.owner and following.steps and following.steps[-1].startswith("."):
                        one.owner = following.steps
        for node in self._level:
            if id(node) not in met and not self.found[node.origin].chains:
                self.found[node.origin].unseen.append(_text((*node.closed(), _unseen())))
        self._kept += referrers
        return above

    def _above(self, node: _Node, referrer: Any) -> _Node:
        target = node.value
        if is_a(referrer, dict):
            # It may be the __dict__ of an object: the next level decides.
            key = next((key for key, item in items_of(referrer) if item is target), None)
            return _Node(referrer, node.closed(), node.origin, short(key))
        if is_a(referrer, types.FrameType):
            return self._of_an_error(node, referrer)
        if node.key and namespace(referrer) is target:
            step = f".{node.key.strip(chr(39))} of {_called(referrer)}"
            return _Node(referrer, (*node.steps, step), node.origin)
        if is_a(referrer, list):
            index = next((i for i, item in enumerate(list.__iter__(referrer)) if item is target), 0)
            step = f"[{index}] of a list"
        elif is_a(referrer, types.CellType):
            step = "a closure's variable"
        elif is_a(referrer, types.FunctionType):
            step = f"function {text_of(referrer.__qualname__)}"
        elif is_a(referrer, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
            step = f"a local of the suspended {text_of(referrer.__qualname__)}"
        else:
            names = [name for name, item in items_of(namespace(referrer) or {}) if item is target]
            step = f".{names[0]} of {_called(referrer)}" if names else f"in {_called(referrer)}"
        return _Node(referrer, (*node.closed(), step), node.origin)

    def _of_an_error(self, node: _Node, frame: types.FrameType) -> _Node:
        """The frame of a function that has ended: the traceback of an error keeps it."""
        names = [name for name, value in variables(frame) if value is node.value]
        step = f"local {names[0]!r} of {place(frame)}" if names else f"a local of {place(frame)}"
        if self._errors is None:
            self._errors = _errors_by_frame()
            self._hidden.add(id(self._errors))
        error = self._errors.get(id(frame))
        if error is None:
            return _Node(frame, (*node.closed(), step), node.origin)
        traceback = f"the traceback of a {class_name(type(error))}"
        return _Node(error, (*node.closed(), step, traceback), node.origin)


def _modules() -> dict[int, tuple[str, dict[str, Any]]]:
    """``id`` of the ``__dict__`` of a module -> its name, and that dict."""
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    for name, module in sys.modules.copy().items():
        if is_a(module, types.ModuleType) and (held := namespace(module)) is not None:
            found.setdefault(id(held), (text_of(name) or "?", held))
    return found


def _errors_by_frame() -> dict[int, BaseException]:
    """``id`` of a frame in a traceback -> the error."""
    found: dict[int, BaseException] = {}
    traceback_of: Any = vars(BaseException)["__traceback__"]
    for error in objects_of(gc.get_objects):
        if is_a(error, BaseException):
            traceback = traceback_of.__get__(error)
            while traceback is not None:
                found.setdefault(id(traceback.tb_frame), error)
                traceback = traceback.tb_next
    return found


def _unseen() -> str:
    """The last step if no referrer is found: a tuple, an autograd graph, a NumPy array, a call in C.

    Before Python 3.13 also a local variable.
    """
    where = "" if NAMED else ", ".join(users_functions()[:_FUNCTIONS])
    return (f"a local of {where}, or " if where else "") + _UNSEEN


def _text(steps: Iterable[str]) -> str:
    steps = tuple(steps)
    if len(steps) > 2 * _STEPS + 1:
        between = f"... {len(steps) - 2 * _STEPS} more ..."
        steps = (*steps[:_STEPS], between, *steps[-_STEPS:])
    return " <- ".join(steps)


def _is_of_this_package(referrer: Any) -> bool:
    if is_a(referrer, types.FrameType):
        return is_ours(referrer)
    if is_a(referrer, types.GeneratorType):
        return referrer.gi_frame is not None and is_ours(referrer.gi_frame)
    return f"{module_name(type(referrer))}.".startswith(__name__.removesuffix("memory.holders"))


def _called(value: Any) -> str:
    return f"the class {class_name(value)}" if is_a(value, type) else f"a {class_name(type(value))}"
