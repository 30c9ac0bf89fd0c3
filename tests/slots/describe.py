"""Run in a process of its own: what pickle, copy, inspect and typing say about a list of slots.

    python -m tests.slots.describe patched REPORT
    python -m tests.slots.describe bare REPORT PLACES

``patched`` imports the package, applies every fix and describes every slot that the ledger has written; ``bare`` does
not import it and describes the slots of another report. A report is one JSON object.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import json
import os
import pickle
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Place = tuple[str, str, str]  # module, dotted path of the owner below it ("" for the module itself), name
_OWNERS = (type, types.ModuleType, types.FunctionType)
IMPORTED = "== imported"  # written to both streams after all imports
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def main(side: str, report: str, places: str = "") -> None:
    """Describe the slots of one side and write the report."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if side == "patched":
        modules, found, product = _apply()
    else:
        given = json.loads(Path(places).read_text(encoding="utf-8"))
        modules, found = given["modules"], [tuple(place) for place in given["places"]]
        for module in modules:
            importlib.import_module(module)
        product = _product()
        slots = given["slots"]
        assert "diffusers_quantfix" not in sys.modules
    print(IMPORTED, flush=True)
    print(IMPORTED, file=sys.stderr, flush=True)
    described = {".".join(filter(None, place)): describe(*place) for place in found}
    if side == "bare":
        for place, slot in zip(found, described, strict=True):
            described[slot]["loaded"] = _loaded(slots[slot].get("value", {}).get("pickled", []), *place)
    found_out = {"modules": modules, "places": found, "slots": described, "product": product}
    text = json.dumps({**found_out, "borrowed": _borrowed()}, indent=1)
    Path(report).write_text(text, encoding="utf-8")


def _borrowed() -> list[tuple[str, str]]:
    """Which top-level packages have modules with functions of which others."""
    pairs = set()
    for name, module in list(sys.modules.items()):
        if not issubclass(type(module), types.ModuleType):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, types.FunctionType) and isinstance(home := value.__module__, str):
                pairs.add((name.partition(".")[0], home.partition(".")[0]))
    return sorted(pair for pair in pairs if pair[0] != pair[1])


def _product() -> str:
    """The bits of a product of numbers, with a setting that MKL reads once, at its first use."""
    import torch

    os.environ["MKL_CBWR"] = "COMPATIBLE"
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(size, generator=generator) for size in ((257, 311), (311, 129)))
    return hashlib.sha256((one @ other).numpy().tobytes()).hexdigest()


def _apply() -> tuple[list[str], list[Place], str]:
    """The modules to import, the places of all slots, and the product."""
    import diffusers_quantfix
    from diffusers_quantfix.fixes.targets import TARGETS

    for module in sorted({target.module for target in TARGETS.values()}):
        with contextlib.suppress(Exception):  # not in these releases
            importlib.import_module(module)
    product = _product()
    diffusers_quantfix.status()  # also asks whether later releases have a bug again
    from diffusers_quantfix.engine.probe import BASES
    from diffusers_quantfix.fixes import MODULES
    from diffusers_quantfix.process_runner import RUNNER

    # Not what an instance that stands for a module has: bitsandbytes' native library. One more base class is what such
    # a fix is for (Draft.inherit).
    owned = [one for one in RUNNER._ledger._entries if isinstance(one.owner, _OWNERS) and one.name != BASES]
    places = sorted({place_of(one.owner, one.name) for one in owned})
    modules = MODULES | {module for module, _, _ in places}
    # In the order in which they were imported: typing gives one object for Union[str, int] and Union[int, str].
    return [name for name in list(sys.modules) if name in modules], places, product


def place_of(owner: Any, name: str) -> Place:
    """How another process finds a slot. The code of a function is described as the slot of that function."""
    if isinstance(owner, types.ModuleType):
        return owner.__name__, "", name
    if not isinstance(owner, types.FunctionType):
        return owner.__module__, owner.__qualname__, name
    # Its own names may be those of another function, by functools.wraps.
    path, _, name = getattr(owner.__code__, "co_qualname", owner.__qualname__).rpartition(".")
    return owner.__globals__["__name__"], path, name


def describe(module: str, path: str, name: str) -> dict[str, Any]:
    """What is seen of one slot. Each value is a string, or a list or mapping of strings."""
    owner: Any = sys.modules[module]
    for step in filter(None, path.split(".")):
        owner = getattr(owner, step)
    raw = inspect.getattr_static(owner, name)
    found: dict[str, Any] = {"raw": _kind(raw), "own": str(name in vars(owner))}
    if isinstance(owner, type):
        found["kind"] = _asked(lambda: _classified(owner, name))
        found["subclass"] = _asked(lambda: _in_subclass(owner, name))
    for part in ("fget", "fset", "fdel") if isinstance(raw, property) else ():
        found[part] = _function(getattr(raw, part))
    if isinstance(raw, property):
        return found | {"doc": _text(raw.__doc__), "abstract": _asked(lambda: raw.__isabstractmethod__)}
    if isinstance(raw, (staticmethod, classmethod)):
        found["function"] = _function(raw.__func__)
        found["descriptor wraps"] = _asked(lambda: _kind(raw.__wrapped__))
    value = getattr(owner, name)
    found["value"] = _function(value)
    found["same twice"] = str((value is getattr(owner, name), value == getattr(owner, name)))
    found["hashable"] = _asked(lambda: hash(value) == hash(getattr(owner, name)))
    return found


def _function(value: Any) -> dict[str, Any]:
    """Everything about a function, a method, or a class in a slot."""
    if value is None:
        return {}
    return {
        "type": _kind(value),
        "names": _names(value),
        "doc": _asked(lambda: [_text(value.__doc__), _text(inspect.getdoc(value))]),
        "signature": _asked(lambda: str(inspect.signature(value))),
        "argspec": _asked(lambda: str(inspect.getfullargspec(value))),
        "annotations": _asked(lambda: str(inspect.get_annotations(value))),
        "evaluated": _asked(lambda: str(inspect.get_annotations(value, eval_str=True))),
        "hints": _asked(lambda: str(typing.get_type_hints(value, include_extras=True))),
        "defaults": _asked(lambda: [str(value.__defaults__), str(value.__kwdefaults__)]),
        "source": _asked(lambda: inspect.getsource(value)),
        "file": _asked(lambda: [str(inspect.getsourcefile(value)), str(inspect.getsourcelines(value)[1])]),
        "module": _asked(lambda: str(inspect.getmodule(value))),
        "unwrapped": _asked(lambda: _unwrapped(value)),
        "attributes": _asked(lambda: " ".join(sorted(vars(value).keys() - {"__wrapped__"}))),
        "is": {test.__name__: _asked(lambda test=test: str(test(value))) for test in _TESTS},
        "callable": str(callable(value)),
        "self": _asked(lambda: _kind(value.__self__)),
        "func": _asked(lambda: [_kind(value.__func__), str(value.__func__ is value.__func__)]),
        "pickled": [_asked(lambda protocol=p: pickle.dumps(value, protocol).hex()) for p in range(6)],
        "unpickled": [_asked(lambda protocol=p: _round_trip(value, protocol)) for p in range(6)],
        "copied": _asked(lambda: str(_same(copy.copy(value), value))),
        "copied deeply": _asked(lambda: str(_same(copy.deepcopy(value), value))),
        "refuses": _asked(lambda: _refusal(value)),
        "repr": _asked(lambda: _ADDRESS.sub("0x", repr(value))),
    }


_TESTS: list[Callable[[Any], bool]] = [
    inspect.isfunction,
    inspect.ismethod,
    inspect.isroutine,
    inspect.isbuiltin,
    inspect.ismethoddescriptor,
    inspect.isdatadescriptor,
    inspect.isclass,
    inspect.isabstract,
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
    inspect.iscode,
]


def _names(value: Any) -> dict[str, Any]:
    return {
        name: _asked(lambda name=name: str(getattr(value, name)))
        for name in ("__name__", "__qualname__", "__module__", "__isabstractmethod__", "__type_params__")
    }


def _kind(value: Any) -> str:
    """The type itself, and what the object says to ``isinstance``."""
    kinds = [type(value), value.__class__]
    return " as ".join(dict.fromkeys(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))


def _classified(owner: type, name: str) -> list[str]:
    (found,) = [one for one in inspect.classify_class_attrs(owner) if one.name == name]
    return [found.kind, found.defining_class.__qualname__]


def _in_subclass(owner: type, name: str) -> dict[str, Any]:
    """How a subclass that does not override the name sees it, and one that does, through ``super()``."""
    plain = _subclass(owner, {})
    overriding = _subclass(owner, {name: inspect.getattr_static(owner, name)})
    found = {}
    for title, value in (
        ("inherited", lambda: getattr(plain, name)),
        ("super of a class", lambda: getattr(super(overriding, overriding), name)),
        ("of an object", lambda: inspect.getattr_static(plain, name).__get__(_instance(plain), plain)),
        ("super of an object", lambda: getattr(super(overriding, _instance(overriding)), name)),
        ("own through the class", lambda: getattr(overriding, name)),
    ):
        found[title] = _asked(lambda value=value: _bound(value(), (plain, overriding)))
    return found


def _subclass(owner: type, namespace: dict[str, Any]) -> type:
    return types.new_class("Sub", (owner,), exec_body=lambda given: given.update(namespace))


def _instance(cls: type) -> Any:
    if issubclass(cls, sys.modules["torch"].Tensor):
        return sys.modules["torch"].Tensor._make_subclass(cls, sys.modules["torch"].zeros(1))
    return object.__new__(cls)


def _bound(value: Any, classes: Iterable[type]) -> list[str]:
    bound_to = getattr(value, "__self__", None)
    to = (
        "a class"
        if bound_to in classes
        else "an object"
        if isinstance(bound_to, tuple(classes))
        else "nothing"
    )
    return [_kind(value) if callable(value) else "a value", to, _asked(lambda: str(inspect.signature(value)))]


def _unwrapped(value: Any) -> list[str]:
    function = inspect.unwrap(value)
    function = getattr(function, "__func__", function)
    code = inspect.unwrap(function).__code__
    return [code.co_filename, str(code.co_firstlineno), code.co_name]


def _round_trip(value: Any, protocol: int) -> str:
    return _same(pickle.loads(pickle.dumps(value, protocol)), value)


def _loaded(pickles: list[str], module: str, path: str, name: str) -> list[str]:
    """What the other side's pickles of a slot are here."""
    owner: Any = sys.modules[module]
    for step in filter(None, path.split(".")):
        owner = getattr(owner, step)
    return [
        _asked(lambda one=one: _same(pickle.loads(bytes.fromhex(one)), getattr(owner, name)))
        for one in pickles
    ]


def _same(copied: Any, value: Any) -> str:
    if copied is value:
        return "the same object"
    return "an equal object" if copied == value else f"another {_kind(copied)}"


def _refusal(value: Any) -> str:
    """What a call with an argument that nobody has says; empty for functions that take any."""
    if isinstance(value, type):
        return ""
    own = inspect.signature(inspect.unwrap(value), follow_wrapped=False).parameters.values()
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in own):
        return ""
    try:
        value(no_such_argument=1)
    except TypeError as error:  # in other words than upstream, where it is ours that refuses
        return type(error).__name__
    return "accepted"


def _text(value: Any) -> str:
    return _ADDRESS.sub("0x", str(value))


def _asked(question: Callable[[], Any]) -> Any:
    """The answer, as text where it is not a list or mapping, or the error."""
    try:
        answer = question()
    except Exception as error:
        return f"{type(error).__name__}: {_text(error)}"
    return answer if isinstance(answer, (list, dict)) else _text(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
