"""The mark of a piece of code: what is compared between two releases of a library.

For a function, the mark consists of its number of lines, the hash of their text, the fingerprint, and what its closure
or `functools.partial` holds; for a property, of all its accessors; for a class, of its bases, metaclass, ``__slots__``
and special methods; for a constant, of its value, if that is simple.  Code of another library is only named.

Nothing is imported or run here.
"""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

from . import fingerprint
from .interruptions import heed_interruption
from .probe import home_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["CALLED", "Files", "inner_function", "is_opaque", "is_same", "mark"]

CALLED = "()"  # ends the name of a piece of which only the interface is compared
_WITH_FUNC = (
    functools.partial,
    functools.partialmethod,
    functools.cached_property,
    functools.singledispatchmethod,
)
_SIMPLE = (str, bytes, int, float, complex, type(None))
_AND = " & "  # between the marks of the functions of one piece
_DIGITS = 16  # of a fingerprint
_DEPTH = 4  # of functions in the closures of functions
# Special methods of a class that only affect its text, or that Python generates.
_NO_MATTER = frozenset(("__annotate__", "__annotate_func__", "__repr__", "__str__"))


class Files:
    """The lines of source files, each read once; dropped after a decision, unlike `linecache`'s cache."""

    def __init__(self) -> None:
        self._lines: dict[str, list[bytes]] = {}

    def lines(self, path: str) -> list[bytes]:
        """The lines of a file, as bytes because most are only hashed; none if it cannot be read."""
        lines = self._lines.get(path)
        if lines is None:
            try:
                with open(path, "rb", buffering=0) as file:
                    lines = file.read().splitlines(True)
            except OSError as error:
                heed_interruption(error)  # TimeoutError is an OSError
                lines = []
            self._lines[path] = lines
        return lines

    def block(self, path: str, first: int) -> str:
        """The text of the definition that begins at a line, counting from 1.

        Raises:
            ValueError: the file is not UTF-8.
            SyntaxError, IndentationError: no definition ends there.
        """
        lines = [line.decode("utf-8") for line in self.lines(path)[first - 1 :]]
        return fingerprint.block_at(lines, 1)


def mark(
    name: str, value: Any, files: Files, known: str = "", below: Callable[[Any, str, Any], Any] | None = None
) -> str:
    """The mark of a piece of code; empty if it cannot be determined.

    Args:
        name: of the piece.
        value: its raw value, from `find`.
        files: reads its source.
        known: its mark in the release where it was proved.  If the text is the same, it is returned, and nothing is
            parsed.
        below: see `find`.
    """
    library, called = name.partition(":")[0].partition(".")[0], name.endswith(CALLED)
    if isinstance(value, CodeType):
        return _mark_of_code(value, files, called, known, "")
    if type(value) is FunctionType and _is_plain(value):
        functions = [(value, value)]
    else:
        functions = list(_functions_of(value, library))
    if functions:
        if (other := _library_of(functions[0][1])) != library:
            return f"of {other} {functions[0][1].__qualname__}"
        before = known.split(_AND)
        if len(before) != len(functions):
            before = [""] * len(functions)
        marks = [
            _mark_of_code(function.__code__, files, called, old, _around(outer, function))
            for (outer, function), old in zip(functions, before, strict=True)
        ]
        return _AND.join(marks) if all(marks) else ""
    if isinstance(value, type):
        return _mark_of_class(value, library, below)
    if isinstance(value, (ModuleType, BuiltinFunctionType)):
        return f"{type(value).__name__} {value.__name__}"
    return f"value {fingerprint.text_hash(_constant(value))}"


def is_same(one: str, other: str) -> bool:
    """Whether two marks, of which at most one is empty, stand for the same code."""
    if one[:1].isdigit() and other[:1].isdigit():
        return _prints(one) == _prints(other)
    return bool(one) and one == other


def is_opaque(constant: Any) -> bool:
    """Whether only the class of a constant is compared."""
    return _constant(constant) == _name_of(type(constant))


def inner_function(value: Any, library: str = "") -> FunctionType | None:
    """The Python function inside a property, classmethod, partial or wrappers; None if there is none.

    Args:
        value: any object.
        library: prefer the innermost function of this library. ``functools.wraps`` is also used on functions that
            replace a method of another library.
    """
    own = None
    for _ in range(64):  # a wrapper that wraps itself must not hang an import
        if isinstance(value, FunctionType):
            own = value if _library_of(value) == library else own
            if "__wrapped__" not in vars(value):
                return own or value
            value = value.__wrapped__  # type: ignore[attr-defined]
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, _WITH_FUNC):
            value = value.func
        elif isinstance(value, type) or not _wraps(value):
            return own
        else:
            value = value.__wrapped__
    return own


# ---------------------------------------------------------------------- helpers


def _wraps(value: Any) -> bool:
    """Whether an object really has ``__wrapped__``; some objects return something for every attribute."""
    return "__wrapped__" in getattr(value, "__dict__", ()) or hasattr(type(value), "__wrapped__")


def _prints(mark: str) -> list[str]:
    return [part.rpartition(" ")[2] for part in mark.split(_AND)]


def _functions_of(value: Any, library: str) -> Iterator[tuple[Any, FunctionType]]:
    """(what holds it, the function) for each Python function of a value that is compared.

    For a property these are its accessors.  A decorator without `functools.wraps` returns a function that holds the
    decorated one only in its closure.
    """
    accessors = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
    pending = [(accessor, 0) for accessor in accessors]
    known = set()
    while pending:
        outer, depth = pending.pop(0)
        function = inner_function(outer, library)
        if function is None or function in known:
            continue
        known.add(function)
        yield outer, function
        if function.__closure__ and depth < _DEPTH:
            held = (cell.cell_contents for cell in function.__closure__ if _is_full(cell))
            inside = [(one, depth + 1) for one in held if isinstance(one, (FunctionType, functools.partial))]
            pending += [one for one in inside if _library_of(inner_function(one[0], library)) == library]


def _is_plain(function: FunctionType) -> bool:
    return function.__closure__ is None and "__wrapped__" not in function.__dict__


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # empty
        return False


def _library_of(function: FunctionType | None) -> str:
    name = function.__globals__.get("__name__") if function is not None else None
    return str(name or "").partition(".")[0]


def _around(value: Any, function: FunctionType) -> str:
    """What is compared of a function besides its text: its outermost wrapper, and the constants bound to it.

    For the wrapper, its library, if that is another one: it is a decorator, or a tool that patches.  Decorators are
    part of the text; what a tool has put over them is not.
    """
    if value is function and function.__closure__ is None:
        return ""
    home = home_of(value).partition(".")[0]
    said = "" if home == _library_of(function) else f"@{home}"
    bound = []
    while isinstance(value, (functools.partial, functools.partialmethod)):
        bound.append(_constant([list(value.args), dict(value.keywords)]))
        value = value.func
    if function.__closure__:
        cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
        # A list or a dictionary may be a cache.
        bound += [
            f"{name}={_constant(cell.cell_contents)}"
            for name, cell in cells
            if _is_full(cell) and isinstance(cell.cell_contents, (*_SIMPLE, tuple))
        ]
    return f"{said}~{fingerprint.text_hash(' '.join(bound))}" if bound else said


def _mark_of_class(value: type, library: str, below: Callable[[Any, str, Any], Any] | None) -> str:
    if (other := _module_of(value).partition(".")[0]) != library:
        return f"of {other} {value.__qualname__}"
    said = "class " + " ".join(f"{_module_of(base)}:{base.__qualname__}" for base in value.__bases__)
    own, more = vars(value), []
    if type(value) is not type:
        more.append(f"metaclass {_module_of(type(value))}:{type(value).__qualname__}")
    if "__slots__" in own:
        more.append(f"slots {_constant(own['__slots__'])}")
    for name, held in own.items():
        if name[:2] == "__" == name[-2:] and name not in _NO_MATTER:
            function = inner_function(held, library)
            if function is not None and _library_of(function) != library and below is not None:
                function = _own_below(value, name, library, below)
            if function is not None and _library_of(function) == library:
                more.append(name)
    return f"{said} {fingerprint.text_hash(' '.join(sorted(more)))}" if more else said


def _own_below(
    owner: type, name: str, library: str, below: Callable[[Any, str, Any], Any]
) -> FunctionType | None:
    """The function that the class itself has in the library, below our patch; None if it has none of its own."""
    upstream = below(owner, name, vars(owner)[name])
    inherited = any(vars(base).get(name) is upstream for base in owner.__mro__[1:])
    return None if inherited else inner_function(upstream, library)


def _module_of(value: type) -> str:
    return str(getattr(value, "__module__", ""))


def _mark_of_code(code: CodeType, files: Files, called: bool, known: str, around: str) -> str:
    if code.co_filename.startswith("<"):
        # Compiled from generated text, like the methods of a dataclass.
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return f"generated {code.co_name} {' '.join(arguments)}"
    lines, first = files.lines(code.co_filename), code.co_firstlineno
    if not lines:
        return ""
    count, _, rest = known.partition(" ")
    if count.isdigit():
        end = first - 1 + int(count)
        proved_text, _, proved = rest.partition(" ")
        equal = fingerprint.text_hash(b"".join(lines[first - 1 : end])) == proved_text
        if equal and proved[_DIGITS:] == around and not _goes_on(lines, first - 1, end):
            return known
    try:
        text = files.block(code.co_filename, first)
        tree = fingerprint.definition(text)
        same = fingerprint.of_interface(tree) if called else fingerprint.of_tree(tree)
    except Exception as error:
        heed_interruption(error)
        return ""  # a lambda inside an expression, or a file that has changed since it was imported
    return f"{text.count(chr(10))} {fingerprint.text_hash(text)} {same}{around}"


def _goes_on(lines: list[bytes], first: int, end: int) -> bool:
    """Whether the definition that begins at a line, and used to end before ``end``, has more lines now."""
    for line in lines[end:]:
        text = line.lstrip()
        if text and text[:1] != b"#":
            return len(line) - len(text) > len(lines[first]) - len(lines[first].lstrip())
    return False


def _constant(value: Any) -> str:
    """A text for a constant, the same in each process; for any other object, its class only."""
    kind = type(value)
    if isinstance(value, _SIMPLE):
        return repr(value) if kind in (*_SIMPLE, bool) else f"{_name_of(kind)} {_plain(value)}"
    if isinstance(value, dict):
        items = (f"{_constant(key)}: {_constant(item)}" for key, item in value.items())
        return f"{'' if kind is dict else _name_of(kind)}{{{', '.join(sorted(items))}}}"
    if kind in (tuple, list, set, frozenset):
        inside = [_constant(item) for item in value]
        return f"{kind.__name__}({', '.join(inside if kind in (tuple, list) else sorted(inside))})"
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return _name_of(value)
    if _name_of(kind) == "re.Pattern":
        return f"re.Pattern {value.pattern!r} {value.flags}"
    if kind.__qualname__ == "dtype":
        return repr(value)
    name = getattr(value, "_name_", None)  # of an enum member
    return f"{_name_of(kind)}.{name}" if type(name) is str else _name_of(kind)


def _plain(value: Any) -> str:
    """The name of an enum member that is a string or a number; empty for other subclasses of these."""
    name = getattr(value, "_name_", None)
    return name if type(name) is str else ""


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
