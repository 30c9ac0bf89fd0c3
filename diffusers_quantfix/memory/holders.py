"""What holds a tensor: a chain of referrers that a person can follow, from the tensor up to a variable."""

from __future__ import annotations

import gc
import inspect
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["holders"]

_DEPTH = 7  # each level walks the whole heap once
_WIDTH = 12  # and follows so many referrers, those that were met first
_PACKAGE = str(Path(__file__).resolve().parents[1])


@dataclass(eq=False)
class _Node:
    """An object that holds the one before it, and the text of the chain so far."""

    value: Any
    chain: str
    origin: int
    key: str = ""  # of a dict: the text of the key, until it is known whose attributes they are


def holders(values: list[Any], most: int = 3) -> list[list[str]]:
    """For each of ``values`` up to ``most`` chains of what holds it, the shortest first.

    A chain is read from the inside out: ``['x'] of a dict <- .cache of a Sampler <- global 'sampler' of __main__``.
    Empty if nothing in Python holds it. All values are searched together, since each level walks the whole heap.
    """
    found: list[list[str]] = [[] for _ in values]
    running = _running_frames()
    level = [_Node(value, "", origin) for origin, value in enumerate(values)]
    hidden = {id(values), id(running)}
    seen = {(node.origin, id(node.value)) for node in level}
    for _ in range(_DEPTH):
        for node in level:
            for frame in running:
                names = _names_in(frame, node.value)
                found[node.origin] += [_joined(_closed(node), _local(frame, name)) for name in names]
        level = [node for node in level if len(found[node.origin]) < most]
        if not level:
            break
        level = _next_level(level, seen, hidden, found)
    for node in level:
        # No variable at the top: what was met on the way is better than nothing.
        if node.chain and not found[node.origin]:
            found[node.origin].append(_closed(node))
    return [list(dict.fromkeys(chains))[:most] for chains in found]


def _next_level(
    level: list[_Node], seen: set[tuple[int, int]], hidden: set[int], found: list[list[str]]
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
            if isinstance(referrer, types.FrameType):
                names = _names_in(referrer, node.value)
                found[node.origin].append(
                    _joined(_closed(node), _local(referrer, names[0] if names else "?"))
                )
            elif isinstance(referrer, dict) and (module := _module_of(referrer)):
                step = f"global {_key_of(referrer, node.value)} of {module}"
                found[node.origin].append(_joined(_closed(node), step))
            elif width.get(node.origin, 0) < _WIDTH:
                width[node.origin] = width.get(node.origin, 0) + 1
                above.append(_step(referrer, node))
    return above


def _step(referrer: Any, node: _Node) -> _Node:
    """One link up from ``node`` to ``referrer``."""
    target = node.value
    if isinstance(referrer, dict):
        return _Node(referrer, _closed(node), node.origin, _key_of(referrer, target))
    if node.key and getattr(referrer, "__dict__", None) is target:
        step = f".{node.key.strip(chr(39))} of {_called(referrer)}"
        return _Node(referrer, _joined(node.chain, step), node.origin)
    chain = _closed(node)
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
    return _Node(referrer, _joined(chain, step), node.origin)


def _closed(node: _Node) -> str:
    """The chain of ``node``; a dict that is nobody's ``__dict__`` is named as a dict."""
    return _joined(node.chain, f"[{node.key}] of a dict") if node.key else node.chain


def _running_frames() -> list[types.FrameType]:
    """The frames of all threads that are not ours: their locals are invisible to the garbage collector."""
    frames = []
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            if not frame.f_code.co_filename.startswith(_PACKAGE):
                frames.append(frame)
            frame = frame.f_back
    return frames


def _names_in(frame: types.FrameType, target: Any) -> list[str]:
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return []  # a module's or a class's body: its variables are found as a dict
    variables = frame.f_locals
    names = [name for name, item in variables.items() if item is target]
    if sys.version_info < (3, 13):
        # There it is a copy that stays with the frame: it would keep everything alive that the function deletes.
        variables.clear()
    return names


def _local(frame: types.FrameType, name: str) -> str:
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name)  # Python 3.10 knows the short name only
    return f"local {name!r} of {function} ({Path(code.co_filename).name}:{frame.f_lineno})"


def _module_of(namespace: dict[Any, Any]) -> str:
    for name, module in list(sys.modules.items()):
        if getattr(module, "__dict__", None) is namespace:
            return name
    return ""


def _key_of(mapping: dict[Any, Any], target: Any) -> str:
    key = next((key for key, item in list(mapping.items()) if item is target), None)
    return repr(key)[:60] if isinstance(key, (str, int)) else "..."


def _is_ours(referrer: Any) -> bool:
    if isinstance(referrer, types.FrameType):
        return referrer.f_code.co_filename.startswith(_PACKAGE)
    return type(referrer).__module__.partition(".")[0] == __name__.partition(".")[0] or isinstance(
        referrer, types.GeneratorType
    )


def _called(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _joined(chain: str, step: str) -> str:
    return f"{chain} <- {step}" if chain else step
