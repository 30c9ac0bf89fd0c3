"""Fingerprints of code: any change that can matter is noticed, reformatting never is."""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import hashlib
import inspect
import json.decoder
import logging
import random
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from diffusers_quantfix.engine import fingerprint

SOURCES = (argparse, json.decoder, logging)


def functions() -> list[ast.stmt]:
    """Every function and method of some modules of the standard library."""
    found: list[ast.stmt] = []
    for module in SOURCES:
        tree = ast.parse(inspect.getsource(module))
        found += [
            node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
    return found


FUNCTIONS = functions()


def of(source: str) -> str:
    return fingerprint.of_text(textwrap.dedent(source).lstrip("\n"))


# ---------------------------------------------------------------------- what does not matter


def test_formatting_does_not_matter():
    for function in FUNCTIONS:
        text = ast.unparse(function)
        assert fingerprint.of_text(text) == fingerprint.of_tree(function)
        assert fingerprint.of_text(textwrap.indent(text, "    ")) == fingerprint.of_tree(function)


@pytest.mark.parametrize(
    "other",
    (
        'def f(a, b=1):\n    """Says something else."""\n    return a + b\n',
        "def f(a, b=1):  # a comment\n    # another\n\n    return a + b\n",
        "def f(a: int, b: int = 1) -> int:\n    return a + b\n",
        "def f(\n    a,\n    b=1,\n):\n    return (\n        a\n        + b\n    )\n",
        "def f(a, b=0x1):\n    return a + b\n",
    ),
)
def test_these_are_the_same(other):
    assert of('def f(a, b=1):\n    """Adds."""\n    return a + b\n') == of(other)


def test_an_annotated_assignment_is_an_assignment():
    assert of("def f():\n    x: int = 1\n    return x\n") == of("def f():\n    x = 1\n    return x\n")


def test_quotes_and_the_way_an_f_string_is_put_together_do_not_matter():
    assert of("def f(a):\n    return f'{a!r:>{4}} b' 'c'\n") == of(
        'def f(a):\n    return f"{a!r:>{4}} " "bc"\n'
    )


def test_the_block_at_a_line_begins_with_its_decorators_and_ends_before_the_next():
    lines = textwrap.dedent(
        '''
        @one
        @two(
            3
        )
        def f(a):
            """Text
        that is not indented."""
            return a  # the end


        def g(): pass
        '''
    ).splitlines(True)
    assert fingerprint.block_at(lines, 2) == "".join(lines[1:9])


def test_the_same_on_each_python():
    """A literal, so that each interpreter that runs this test compares its syntax trees with those of the others."""
    source = '''
        @decorator(1, key="v")
        async def f(self, a, /, b: int = -1, *args, c=(1, 2.5, None, b"x"), **kwargs) -> None:
            """Doc."""
            with open(a) as one, open(b) as two:
                async for x in y:
                    yield f"{x!r:>{width}}{{}}" f" {a=}"
            try:
                del a[1:2, ...]
            except (ValueError, OSError) as error:
                raise RuntimeError("text \\\\d") from error
            else:
                lambda q: {**q, "k": [*q]}
            match a:
                case {"x": None, **rest} if rest:
                    return
                case [1, *_] | Point(x=0):
                    pass
            return not (await g(x for x in y if x)) if (n := 1) else ~n
    '''
    assert of(source) == "5385639ac5ba01ae"


# ---------------------------------------------------------------------- what does


class Mutation(ast.NodeTransformer):
    """One change of a function, at a place that ``rng`` chooses; ``done`` says whether there was one."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self.kind, self.rng, self.done = kind, rng, False


def mutated(function: ast.stmt, kind: str, rng: random.Random) -> ast.stmt | None:
    """A copy of ``function`` with one change, None where there is no place for it."""
    changed: Any = copy.deepcopy(function)
    places = [node for node in ast.walk(changed) if _fits(node, kind)]
    if not places:
        return None
    node: Any = rng.choice(places)
    if kind == "a renamed local":
        node.id += "_"
    elif kind == "swapped arguments":
        node.args[0], node.args[1] = node.args[1], node.args[0]
    elif kind == "a changed constant":
        node.value = _other(node.value)
    elif kind == "a changed default":
        node.defaults[rng.randrange(len(node.defaults))] = ast.Constant("another default")
    elif kind == "a removed branch":
        node.orelse = []
    elif kind == "a new decorator":
        changed.decorator_list.insert(0, ast.Name("new", ast.Load()))
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
    return ast.fix_missing_locations(changed)


def _fits(node: Any, kind: str) -> bool:
    same = {
        "a renamed local": lambda: isinstance(node, ast.Name),
        "swapped arguments": lambda: (
            isinstance(node, ast.Call)
            and len(node.args) > 1
            and ast.dump(node.args[0]) != ast.dump(node.args[1])
        ),
        "a changed constant": lambda: isinstance(node, ast.Constant) and not getattr(node, "is_text", False),
        "a changed default": lambda: isinstance(node, ast.arguments) and node.defaults,
        "a removed branch": lambda: isinstance(node, ast.If) and node.orelse,
        "a new decorator": lambda: isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)),
        "a removed statement": lambda: (
            isinstance(node, (ast.If, ast.For, ast.FunctionDef)) and len(node.body) > 1
        ),
        "another operator": lambda: isinstance(node, ast.Compare),
        "a negated condition": lambda: isinstance(node, (ast.If, ast.While, ast.IfExp)),
        "another keyword": lambda: isinstance(node, ast.keyword) and node.arg,
        "another attribute": lambda: isinstance(node, ast.Attribute),
        "statements in another order": lambda: (
            isinstance(node, (ast.If, ast.For, ast.FunctionDef))
            and len(node.body) > 1
            and ast.dump(node.body[0]) != ast.dump(node.body[-1])
            and not _is_text(node.body[0])
        ),
        "a new argument": lambda: isinstance(node, ast.arguments),
    }
    return bool(same[kind]())


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "another" if not isinstance(value, bytes) else b"another"


KINDS = (
    "a renamed local", "swapped arguments", "a changed constant", "a changed default", "a removed branch",
    "a new decorator", "a removed statement", "another operator", "a negated condition", "another keyword",
    "another attribute", "statements in another order", "a new argument",
)  # fmt: skip


def _without_texts(function: ast.stmt) -> ast.stmt:
    """A copy without docstrings, annotations and texts inside of f-strings, which no mutation is to hit."""
    bare: Any = copy.deepcopy(function)
    for node in ast.walk(bare):
        for field in ("body", "orelse", "finalbody"):
            inside = getattr(node, field, None)
            if isinstance(inside, list) and inside:
                setattr(node, field, [item for item in inside if not _is_text(item)] or [ast.Pass()])
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                setattr(node, field, None)
    return ast.fix_missing_locations(bare)


@functools.cache
def bare_functions() -> list[ast.stmt]:
    return [_without_texts(function) for function in FUNCTIONS]


def mutations(kind: str) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    rng = random.Random(kind)
    for bare in bare_functions():
        changed = mutated(bare, kind, rng)
        if changed is not None and ast.dump(changed) != ast.dump(bare):
            yield bare, changed


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_noticed(kind):
    count = 0
    for bare, changed in mutations(kind):
        assert fingerprint.of_tree(bare) != fingerprint.of_tree(changed), ast.unparse(changed)
        count += 1
    assert count >= 20, count


@pytest.mark.parametrize(
    ("one", "other"),
    (
        ("class A(B):\n    x = 1\n", "class A(C):\n    x = 1\n"),
        ("class A(B):\n    x = 1\n", "class A(B):\n    x = 1.0\n"),
        ("class A:\n    x: int\n", "class A:\n    y: int\n"),
        ("def f(a, b): pass\n", "def f(b, a): pass\n"),
        ("def f(a, *, b): pass\n", "def f(a, b): pass\n"),
        ("def f(a, /, b): pass\n", "def f(a, b): pass\n"),
        ("def f(): return True\n", "def f(): return 1\n"),
        ("def f(): return 'a'\n", "def f(): return b'a'\n"),
        ("def f(): return ()\n", "def f(): return []\n"),
        ("def f(): return 0.0\n", "def f(): return -0.0\n"),
        ("def f(): return None\n", "def f(): return\n"),
        ("def f(a): return f'{a}'\n", "def f(a): return f'{a!r}'\n"),
        ("def f(a): return f'{a}'\n", "def f(a): return f'{a:>3}'\n"),
        ("def f(): return '\\\\d'\n", "def f(): return '\\\\\\\\d'\n"),
        ("def f(): return r'\\d'\n", "def f(): return r'\\\\d'\n"),
        ("def f(): yield x\n", "def f(): yield from x\n"),
        ("def f(): g()\n", "async def f(): g()\n"),
        ("def f(a): return a[1:]\n", "def f(a): return a[:1]\n"),
        ("def f(**k): return g(**k)\n", "def f(**k): return g(k=k)\n"),
        ("def f(): from a import b\n", "def f(): from .a import b\n"),
        ("def f(): import a as b\n", "def f(): import a\n"),
        ("def f():\n    global x\n    x = 1\n", "def f():\n    nonlocal x\n    x = 1\n"),
        ("def f():\n    try: g()\n    finally: h()\n", "def f():\n    try: g()\n    except: h()\n"),
    ),
)
def test_small_things_that_matter(one, other):
    assert of(one) != of(other)


def test_two_functions_of_real_code_have_different_fingerprints():
    dumped: dict[str, str] = {}
    for function in bare_functions():
        text = ast.unparse(function)
        assert dumped.setdefault(fingerprint.of_text(text), text) == text
    assert len(dumped) > 200


def test_an_escape_that_python_warns_of_warns_nobody():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fingerprint.of_text("def f(): return '\\d'\n")
    assert not seen


def test_what_is_no_definition_is_an_error():
    with pytest.raises(SyntaxError):
        fingerprint.of_text("def f(:\n")


def test_the_hash_of_a_text_is_short_and_takes_any_text():
    assert fingerprint.text_hash("a\udcff") == hashlib.blake2b(b"a\\udcff", digest_size=8).hexdigest()
