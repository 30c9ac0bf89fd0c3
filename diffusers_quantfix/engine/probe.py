"""Inspects functions of other libraries without running or changing them."""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import CodeType, FunctionType, ModuleType

from .classes import module_name
from .errors import TargetMissing
from .interruptions import heed_interruption

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BASES = "__bases__"
_ABSENT = object()


def slot(owner: object, name: str) -> tuple[bool, Any]:
    """What ``owner`` holds under ``name``, without binding it.

    Returns:
        (whether the slot is the owner's own, the raw value: a staticmethod, property, function, ...).

    Raises:
        TargetMissing: neither the owner nor a base class has it.
    """
    if isinstance(owner, type):
        if name == BASES:  # not in the dictionary of a class, though its own
            return True, owner.__bases__
        for cls in owner.__mro__:
            if name in vars(cls):
                return cls is owner, vars(cls)[name]
    elif isinstance(owner, ModuleType):
        if name in vars(owner):
            return True, vars(owner)[name]
    else:
        value = getattr(owner, name, _ABSENT)
        if value is not _ABSENT:
            # An instance in place of a module owns what is in its own dictionary, and what its class stores through a
            # data descriptor, like the ``__code__`` of a function.
            own = name in getattr(owner, "__dict__", ())
            return own or hasattr(getattr(type(owner), name, None), "__set__"), value
    raise TargetMissing(f"{name_of(owner)} has no {name}")


def resolve(module: object, path: str) -> Any:
    """The raw value at a dotted path below a module: ``resolve(functional, "QuantState.to")``.

    Raises:
        TargetMissing: a step of the path does not exist in this release.
    """
    value: Any = module
    for name in path.split("."):
        value = _submodule(value, name) or slot(value, name)[1]
    return value


def _submodule(module: Any, name: str) -> ModuleType | None:
    """A submodule that its package has no attribute for: Python sets none where the first import of the package was
    interrupted, and a second one found the submodule imported."""
    if not isinstance(module, ModuleType) or name in vars(module):
        return None
    found = sys.modules.get(f"{module.__name__}.{name}")
    return found if isinstance(found, ModuleType) else None


def function_of(value: Any) -> FunctionType:
    """The plain function inside a property, staticmethod, classmethod or a chain of wrappers.

    Raises:
        TargetMissing: there is no Python function inside (a builtin, a C function).
    """
    for _ in range(64):  # a wrapper that wraps itself must not hang an import
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        else:
            break
    if not isinstance(value, FunctionType):
        raise TargetMissing(f"{value!r} is not a Python function")
    return value


def nested_code(code: CodeType, name: str) -> CodeType:
    """The code object of the function ``name`` defined inside ``code``.

    Raises:
        TargetMissing: nothing of that name is defined there.
    """
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name == name:
            return constant
    raise TargetMissing(f"{code.co_name} defines no {name}")


def unimported_code(module: str, path: str) -> CodeType:
    """The code of a function, at a dotted path in a module that need not be imported: the module is not executed.

    Its parent package is imported.

    Raises:
        TargetMissing: this release has no such module or function, or its code cannot be read.
    """
    try:
        spec = importlib.util.find_spec(module)
        code = spec.loader.get_code(module) if spec is not None else None  # type: ignore[union-attr]
    except (ImportError, ValueError, AttributeError, OSError) as error:
        heed_interruption(error)  # TimeoutError is an OSError
        raise TargetMissing(f"the code of {module} cannot be read") from error
    if code is None:
        raise TargetMissing(f"there is no code of {module}")
    for name in path.split("."):
        code = nested_code(code, name)
    return code


def names_used(function: Any) -> frozenset[str]:
    """Every name and string constant in a function's code, nested functions included."""
    return names_in(function_of(function).__code__)


def names_in(code: CodeType) -> frozenset[str]:
    """The same for a code object."""
    found: set[str] = set()
    pending = [code]
    while pending:
        code = pending.pop()
        found.update(code.co_names, code.co_freevars)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                pending.append(constant)
            elif isinstance(constant, str):
                found.add(constant)
    return frozenset(found)


def texts_of(function: Any) -> str:
    """All string constants in the code of a function and of what it wraps, for probes that look for a message."""
    texts: list[str] = []
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None:
            texts.extend(constant for constant in code.co_consts if isinstance(constant, str))
        function = getattr(function, "__wrapped__", None)
    return "\n".join(texts)


def written_in(function: Any, module: str) -> bool:
    """Whether ``function``, or something that it wraps, was defined in the module of that name.

    The file name of its code is no help: in an installation without sources, or a frozen program, it is the path at
    which the code was compiled.
    """
    while function is not None:
        # Wrapt's wrappers pass attribute access on to what they wrap.
        code = getattr(function, "_self_wrapper", function)
        namespace = getattr(code, "__globals__", None)
        if isinstance(namespace, dict) and namespace.get("__name__") == module:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def name_of(owner: object) -> str:
    """The dotted name of a module, class or function, for a sentence."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    if isinstance(owner, FunctionType):  # functools.wraps may have given it another function's names
        name = getattr(owner.__code__, "co_qualname", owner.__qualname__)
        return f"{home_of(owner)}.{name}".lstrip(".")
    home = _said_module(owner)
    name = getattr(owner, "__qualname__", None)
    if not isinstance(name, str):  # a native library returns something for every name
        name = type(owner).__name__
    return f"{home}.{name}".lstrip(".")


def home_of(value: Any) -> str:
    """The module in which a function, wrapper or property was defined; empty if that is unknown.

    Wrapt's wrappers return the module of what they wrap, so the wrapper function is checked first.
    """
    wrapper = getattr(value, "_self_wrapper", None)
    if wrapper is not None:
        return _said_module(wrapper)
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, FunctionType):
        # functools.wraps copies __module__ from the wrapped function; the globals are reliable.
        name = value.__globals__.get("__name__")
        return name if type(name) is str else ""
    return _said_module(value)


def _said_module(value: Any) -> str:
    """The ``__module__`` of a class or function; empty if it is not a string, or raises."""
    if isinstance(value, type):
        return module_name(value)
    try:
        name = value.__module__
    except Exception as error:
        heed_interruption(error)
        return ""
    return name if type(name) is str else ""
