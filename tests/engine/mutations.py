"""Changes of functions, for the tests of fingerprints: those that matter, and rewritings that do not."""

from __future__ import annotations

import ast
import copy
import io
import random
import tokenize
from typing import Any

KINDS = (
    "a renamed local", "a local renamed everywhere", "swapped arguments", "a changed constant", "a changed default",
    "a removed default", "a removed branch", "another exception", "a new decorator", "a removed decorator",
    "a changed base class", "a removed statement", "another operator", "a negated condition", "another keyword",
    "another attribute", "statements in another order", "a new argument", "arguments in another order",
    "a function that is async",
)  # fmt: skip
REWRITINGS = (
    "unparsed",
    "comments",
    "blank lines",
    "docstrings",
    "annotations",
    "no annotations",
    "wrapped",
    "indented",
)


def without_texts(function: ast.stmt) -> ast.stmt:
    """A copy without docstrings, annotations, ``pass`` and ``...``, which no mutation is to hit."""
    bare: Any = copy.deepcopy(function)
    for node in ast.walk(bare):
        for field in ("body", "orelse", "finalbody"):
            inside = getattr(node, field, None)
            if isinstance(inside, list) and inside:
                setattr(node, field, [item for item in inside if not _is_nothing(item)] or [ast.Pass()])
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:  # that of a field is not optional
                setattr(node, field, ast.Tuple([], ast.Load()) if isinstance(node, ast.AnnAssign) else None)
    return ast.fix_missing_locations(bare)


def mutated(function: ast.stmt, kind: str, rng: random.Random) -> ast.stmt | None:
    """A copy of ``function``, which has no texts, with one change at a random place; None where there is no place."""
    changed: Any = copy.deepcopy(function)
    places = [node for node in ast.walk(changed) if _fits(node, kind)]
    if not places:
        return None
    node: Any = rng.choice(places)
    if kind == "a renamed local":
        node.id += "_"
    elif kind == "a local renamed everywhere":
        for other in ast.walk(changed):
            if isinstance(other, ast.Name) and other.id == node.id and other is not node:
                other.id += "_"
        node.id += "_"
    elif kind == "swapped arguments":
        node.args[0], node.args[1] = node.args[1], node.args[0]
    elif kind == "a changed constant":
        node.value = _other(node.value)
    elif kind == "a changed default":
        node.defaults[rng.randrange(len(node.defaults))] = ast.Constant("another default")
    elif kind == "a removed default":
        del node.defaults[0]
    elif kind == "a removed branch":
        node.orelse = []
    elif kind == "another exception":
        node.type = ast.Name("AnotherError", ast.Load())
    elif kind == "a new decorator":
        node.decorator_list.insert(0, ast.Name("new", ast.Load()))
    elif kind == "a removed decorator":
        del node.decorator_list[-1]
    elif kind == "a changed base class":
        node.bases = [*node.bases[:-1], ast.Name("AnotherBase", ast.Load())]
    elif kind == "a removed statement":
        del node.body[-1]
    elif kind == "another operator":
        node.ops[0] = ast.Is() if not isinstance(node.ops[0], ast.Is) else ast.Eq()
    elif kind == "a negated condition":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif kind == "another keyword":
        node.arg += "_"
    elif kind == "another attribute":
        node.attr += "_"
    elif kind == "statements in another order":
        node.body[0], node.body[-1] = node.body[-1], node.body[0]
    elif kind == "a new argument":
        node.kwonlyargs.append(ast.arg("new"))
        node.kw_defaults.append(ast.Constant(None))
    elif kind == "arguments in another order":
        node.args[0], node.args[-1] = node.args[-1], node.args[0]
    elif kind == "a function that is async":
        node.__class__ = ast.AsyncFunctionDef
    return ast.fix_missing_locations(changed)


def _fits(node: Any, kind: str) -> bool:
    def two_different(statements: list[Any]) -> bool:
        return len(statements) > 1 and ast.dump(statements[0]) != ast.dump(statements[-1])

    function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    block = isinstance(node, (ast.If, ast.For, ast.FunctionDef))
    return bool({
        "a renamed local": lambda: isinstance(node, ast.Name),
        "a local renamed everywhere": lambda: isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store),
        "swapped arguments": lambda: isinstance(node, ast.Call) and two_different(node.args[:2]),
        "a changed constant": lambda: isinstance(node, ast.Constant),
        "a changed default": lambda: isinstance(node, ast.arguments) and node.defaults,
        "a removed default": lambda: isinstance(node, ast.arguments) and node.defaults,
        "a removed branch": lambda: isinstance(node, (ast.If, ast.For, ast.Try)) and node.orelse,
        "another exception": lambda: isinstance(node, ast.ExceptHandler),
        "a new decorator": lambda: function or isinstance(node, ast.ClassDef),
        "a removed decorator": lambda: function and node.decorator_list,
        "a changed base class": lambda: isinstance(node, ast.ClassDef),
        "a removed statement": lambda: block and len(node.body) > 1,
        "another operator": lambda: isinstance(node, ast.Compare),
        "a negated condition": lambda: isinstance(node, (ast.If, ast.While, ast.IfExp)),
        "another keyword": lambda: isinstance(node, ast.keyword) and node.arg,
        "another attribute": lambda: isinstance(node, ast.Attribute),
        "statements in another order": lambda: block and two_different(node.body),
        "a new argument": lambda: isinstance(node, ast.arguments),
        "arguments in another order": lambda: isinstance(node, ast.arguments) and two_different(node.args),
        "a function that is async": lambda: isinstance(node, ast.FunctionDef),
    }[kind]())  # fmt: skip


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return f"{value}, another" if not isinstance(value, bytes) else value + b"another"


def _is_nothing(node: Any) -> bool:
    ellipsis = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...
    return ellipsis or isinstance(node, ast.Pass) or _is_text(node)


def _is_text(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# ---------------------------------------------------------------------- rewritings


def rewritten(text: str, way: str, rng: random.Random) -> str | None:
    """The text of a function written in another way, which does the same; None where this way changes nothing."""
    other = {
        "unparsed": lambda: ast.unparse(ast.parse(text)),
        "comments": lambda: _with_comments(text, rng),
        "blank lines": lambda: _with_blank_lines(text, rng),
        "docstrings": lambda: _with_docstrings(text),
        "annotations": lambda: _annotated(text, ast.Name("Any", ast.Load())),
        "no annotations": lambda: _annotated(text, None),
        "wrapped": lambda: _wrapped(text),
        "indented": lambda: _indented(text),
    }[way]()
    return other if other != text else None


def _tokens(text: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


def _ends(text: str) -> set[int]:
    """The numbers of the lines at which a statement, or the head of a block, ends."""
    return {token.start[0] for token in _tokens(text) if token.type == tokenize.NEWLINE}


def _with_comments(text: str, rng: random.Random) -> str:
    lines, ends = text.splitlines(), _ends(text)
    for number in ends:
        if "#" not in lines[number - 1] and rng.random() < 0.5:
            lines[number - 1] += "  # a comment: (\\"
    return "\n".join(lines) + "\n"


def _with_blank_lines(text: str, rng: random.Random) -> str:
    """Also lines that are only a comment, in any indentation."""
    lines, ends = text.splitlines(), _ends(text)
    for number in sorted(ends, reverse=True):
        if rng.random() < 0.5 and number < len(lines):
            lines[number:number] = rng.choice(([""], ["", "# at the edge", ""], ["                # far in"]))
    return "\n".join(lines) + "\n"


def _with_docstrings(text: str) -> str:
    """Each function and class has another docstring, or one at last."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            new = ast.Expr(ast.Constant('Another "docstring".\n\n    Of more lines.'))
            node.body[: 1 if _is_text(node.body[0]) and len(node.body) > 1 else 0] = [new]
    return ast.unparse(ast.fix_missing_locations(tree))


def _annotated(text: str, annotation: ast.expr | None) -> str:
    tree = ast.parse(text)
    plain = {
        id(arg) for node in ast.walk(tree) if isinstance(node, ast.Lambda) for arg in ast.walk(node.args)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and id(node) not in plain:
            node.annotation = annotation
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = annotation
    return ast.unparse(ast.fix_missing_locations(tree))


def _wrapped(text: str) -> str:
    """A new line and a comment after each comma and each opening bracket."""
    lines = text.splitlines(keepends=True)
    depth, places, inside = 0, [], 0
    for token in _tokens(text):
        if token.type == getattr(tokenize, "FSTRING_START", -1):
            inside += 1
        elif token.type == getattr(tokenize, "FSTRING_END", -1):
            inside -= 1
        if token.type != tokenize.OP or inside:  # not inside of an f-string
            continue
        depth += (token.string in "([{") - (token.string in ")]}")
        if depth and token.string in ("(", "[", "{", ","):
            places.append(token.end)
    for row, column in reversed(places):
        line = lines[row - 1]
        lines[row - 1] = f"{line[:column]}  # wrapped\n    {line[column:]}"
    return "".join(lines)


def _indented(text: str) -> str:
    """As the method of a class has it; the lines of a string of several lines stay where they are."""
    inside: set[int] = set()
    for token in _tokens(text):
        if token.start[0] != token.end[0] and token.type != tokenize.NEWLINE:
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    starts = [
        token.start[0] for token in _tokens(text) if token.type == getattr(tokenize, "FSTRING_START", -1)
    ]
    ends = [token.end[0] for token in _tokens(text) if token.type == getattr(tokenize, "FSTRING_END", -1)]
    for start, end in zip(starts, reversed(ends), strict=True):
        inside.update(range(start + 1, end + 1))
    return "".join(
        line if number in inside or not line.strip() else f"    {line}"
        for number, line in enumerate(text.splitlines(keepends=True), 1)
    )
