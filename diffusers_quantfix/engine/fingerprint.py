"""Fingerprints of source code: equal where two releases of a library run the same code.

A fix is proved on code, not on a version number.  A fingerprint is a hash of a function's syntax tree without what
cannot affect behaviour: comments, formatting, positions, docstrings and annotations.  It is the same on every Python
from 3.10 on, although their syntax trees differ in optional fields, and it changes with anything else: a renamed
variable, a different constant, default, decorator, base class or argument order.

Most functions do not change at all between two releases, so the text is compared first: parsing takes about a hundred
times as long.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = [
    "block_at",
    "definition",
    "given_to_self",
    "module",
    "of_function",
    "of_interface",
    "of_text",
    "of_tree",
    "text_hash",
]

# Fields that do not affect behaviour, or that not every Python has. Empty fields are left out too.
_IGNORED = frozenset(
    (
        "annotation",
        "col_offset",
        "ctx",
        "end_col_offset",
        "end_lineno",
        "kind",
        "lineno",
        "returns",
        "type_comment",
    )
)
# Parsing an unknown escape in a non-raw string would issue a warning in the program. So whatever looks like one is
# parsed as two backslashes between marks, and put back afterwards; the value of a raw string keeps both backslashes.
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = frozenset("\n\\'\"abfnrtvxNuU01234567")
_MARK = "\x01"
_REGISTER = frozenset(("add_module", "register_buffer", "register_module", "register_parameter"))
# Annotations with a meaning for dataclass fields.
_KINDS_OF_FIELDS = frozenset(("ClassVar", "InitVar", "KW_ONLY"))
# Decorators that read a function's annotations.
_READ_ANNOTATIONS = frozenset(("custom_op", "register", "script", "triton_op", "validate_call"))
_MARKED = re.compile(rf"{_MARK}\\{{1,2}}{_MARK}")


def of_text(text: str) -> str:
    """The fingerprint of ``text``, which is one definition or statement, indented or not.

    Raises:
        SyntaxError: it is not valid in this Python.
    """
    return of_tree(definition(text))


def of_tree(tree: ast.AST) -> str:
    """The fingerprint of a syntax tree: 16 hexadecimal digits."""
    return _digest("".join(_parts(tree)).encode("utf-8", "backslashreplace"))


def of_function(tree: ast.AST, name: str, called: bool = False) -> str:
    """The fingerprint that a function would have under another name; empty for anything else.

    Args:
        tree: its syntax tree.
        name: the other name.
        called: whether to return the fingerprint of its interface.
    """
    if not isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    renamed = copy.copy(tree)
    renamed.name = name
    return of_interface(renamed) if called else of_tree(renamed)


def of_interface(tree: ast.AST) -> str:
    """The fingerprint of what callers of a function, or subclasses of a class, see of it.

    For a function: its name, arguments, defaults and decorators, and the attributes that it sets on ``self``; not what
    else its body does.
    """
    if not isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return of_tree(tree)
    attributes = sorted(given_to_self(tree)) if tree.name == "__init__" else []
    outside = (*tree.decorator_list, tree.args)
    text = "".join(part for node in outside for part in _parts(node))
    kind = f"{type(tree).__name__}{' that yields' if _yields(tree) else ''}"
    return _digest(f"{kind} {tree.name} {text} {attributes}".encode("utf-8", "backslashreplace"))


def given_to_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The attributes that a method sets on its first argument: by assignment, or as a buffer or parameter."""
    first = (*function.args.posonlyargs, *function.args.args)[:1]
    declared = {
        id(node.target)
        for node in ast.walk(function)
        if isinstance(node, ast.AnnAssign) and node.value is None
    }
    found = set()
    for node in ast.walk(function):
        call = node if isinstance(node, ast.Call) else None
        place: Any = call.func if call is not None else node
        if not (first and isinstance(place, ast.Attribute) and isinstance(place.value, ast.Name)):
            continue
        if place.value.id != first[0].arg or id(place) in declared:
            continue
        if call is None and isinstance(place.ctx, ast.Store):
            found.add(place.attr)
        elif (
            call is not None
            and place.attr in _REGISTER
            and call.args
            and isinstance(call.args[0], ast.Constant)
        ):
            found.add(str(call.args[0].value))
    return found


def _yields(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a generator."""
    pending: list[ast.AST] = [*function.body]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)
    return False


def text_hash(text: str | bytes) -> str:
    """A hash of the exact text: 16 hexadecimal digits."""
    return _digest(text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace"))


def definition(text: str) -> ast.stmt:
    """The syntax tree of ``text``, which is one definition or statement, indented or not.

    Raises:
        SyntaxError: it is not valid in this Python.
    """
    text = _ESCAPE.sub(_marked, text)
    if text[:1].isspace():  # not textwrap.dedent, which would change lines inside strings
        body: Any = ast.parse(f"if 1:\n{text}").body[0]
        return body.body[0]  # type: ignore[no-any-return]
    return ast.parse(text).body[0]


def module(text: str) -> ast.Module:
    """The syntax tree of a module; its definitions have the same fingerprints as when they are parsed alone.

    Raises:
        SyntaxError: it is not valid in this Python.
    """
    return ast.parse(_ESCAPE.sub(_marked, text))


def block_at(lines: list[str], first: int) -> str:
    """The text of the definition at a line, which is that of its first decorator, or else of ``def`` or ``class``.

    Args:
        lines: all lines of the file, with their line ends.
        first: the line number, from 1, like ``co_firstlineno``.

    Raises:
        SyntaxError, IndentationError: no definition ends there.
    """
    import inspect

    return "".join(inspect.getblock(lines[first - 1 :]))


def _marked(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] in _KNOWN_ESCAPES else f"{_MARK}\\\\{_MARK}{escape[1]}"


def _unmarked(value: Any) -> Any:
    if isinstance(value, str) and _MARK in value:
        return _MARKED.sub(r"\\", value)
    if isinstance(value, bytes) and _MARK.encode() in value:
        return _MARKED.sub(r"\\", value.decode("latin-1")).encode("latin-1")
    return value


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _parts(node: Any) -> Iterator[str]:
    """The pieces of a canonical text for a syntax tree."""
    if isinstance(node, ast.AnnAssign):
        yield from _annotated(node)
        return
    if isinstance(node, ast.Constant):
        yield f"Constant({type(node.value).__name__}:{_unmarked(node.value)!r})"
        return
    if isinstance(node, ast.JoinedStr):
        yield "JoinedStr("
        for piece in _merged(node.values):
            yield from _parts(piece)
        yield ")"
        return
    ignored = _IGNORED
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if any(_last_name(decorator) in _READ_ANNOTATIONS for decorator in node.decorator_list):
            for arg in ast.walk(node.args):
                if isinstance(arg, ast.arg) and arg.annotation is not None:
                    yield f"{arg.arg}:"
                    yield from _parts(arg.annotation)
            ignored = _IGNORED - {"returns"}
    elif isinstance(node, ast.ClassDef):
        node = copy.copy(node)
        node.body = [_Field(**vars(one)) if isinstance(one, ast.AnnAssign) else one for one in node.body]
    yield f"{type(node).__name__}("
    for field in node._fields:
        if field in ignored:
            continue
        value = getattr(node, field, None)
        if value is None or value == []:
            continue
        yield f"{field}="
        if isinstance(value, list):
            yield "["
            for item in _without_texts(value) if field in ("body", "orelse", "finalbody") else value:
                # The keys of a dictionary display may be None: `**other`.
                yield from _parts(item) if isinstance(item, ast.AST) else (f"{item!r};",)
            yield "]"
        elif isinstance(value, ast.AST):
            yield from _parts(value)
        else:
            yield f"{value!r};"
    yield ")"


class _Field(ast.AnnAssign):
    """An annotated assignment in a class body, which a dataclass makes a field."""


def _annotated(node: ast.AnnAssign) -> Iterator[str]:
    """An assignment, or without a value a declaration, which makes a name local and does nothing for other targets."""
    field = isinstance(node, _Field)
    if field:
        kinds = {_last_name(inside) for inside in ast.walk(node.annotation)} & _KINDS_OF_FIELDS
        if isinstance(node.annotation, ast.Constant):
            kinds = {kind for kind in _KINDS_OF_FIELDS if kind in str(node.annotation.value)}
        yield f"Field{sorted(kinds)}"
    elif node.value is not None:
        yield "Assign"
    elif isinstance(node.target, ast.Name):
        yield "Declare"
    else:
        return
    yield "(targets=["
    yield from _parts(node.target)
    yield "]"
    if node.value is not None:
        yield "value="
        yield from _parts(node.value)
    yield ")"


def _last_name(node: Any) -> str:
    """``c`` for ``a.b.c`` and ``a.b.c(1)``; empty for any other expression."""
    if isinstance(node, ast.Call):
        node = node.func
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


def _without_texts(statements: list[Any]) -> list[Any]:
    """Without docstrings and other bare strings, ``pass`` and ``...``."""
    return [
        statement
        for statement in statements
        if not (
            isinstance(statement, ast.Pass)
            or (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and (isinstance(statement.value.value, str) or statement.value.value is ...)
            )
        )
    ]


def _merged(values: list[Any]) -> list[Any]:
    """The pieces of an f-string, with adjacent constants merged: Python versions split them differently."""
    merged: list[Any] = []
    for value in values:
        if isinstance(value, ast.Constant) and merged and isinstance(merged[-1], ast.Constant):
            texts = str(merged[-1].value), str(value.value)
            merged[-1] = ast.Constant("".join(texts))
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            merged.append(value)
    return merged
