"""Fingerprints of code: any change that can matter is noticed, reformatting never is."""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import inspect
import json.decoder
import logging
import random
import textwrap
import warnings

import pytest

from diffusers_quantfix.engine import fingerprint

from .mutations import KINDS, REWRITINGS, mutated, rewritten, without_texts

SOURCES = (argparse, json.decoder, logging)


def functions() -> list[ast.stmt]:
    """Every function, method and class of some modules of the standard library."""
    found: list[ast.stmt] = []
    for module in SOURCES:
        tree = ast.parse(inspect.getsource(module))
        found += [
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        ]
    return found


FUNCTIONS = functions()
TEXTS = [
    textwrap.dedent(inspect.getsource(value))
    for module in SOURCES
    for owner in (module, *(value for value in vars(module).values() if isinstance(value, type)))
    for value in vars(owner).values()
    if inspect.isfunction(value) and value.__module__ == module.__name__
]


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


@pytest.mark.parametrize(
    ("one", "other"),
    (
        ("def f(): pass\n", "def f(): ...\n"),
        ("class A:\n    def f(self):\n        'Doc.'\n", "class A:\n    def f(self):\n        pass\n"),
        ("def f(self):\n    self.x: int\n    g()\n", "def f(self):\n    g()\n"),
        ("class A:\n    x: int = 1\n", "class A:\n    x: 'Optional[int]' = 1\n"),
        ("@property\ndef f(a) -> int: g()\n", "@property\ndef f(a): g()\n"),
    ),
)
def test_nothing_follows_from_these(one, other):
    assert of(one) == of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    (
        ("def __init__(self):\n    self.x = 1\n", "def __init__(self):\n    self.x = 2\n"),
        ("def __init__(self):\n    self.x: int\n", "def __init__(self): pass\n"),
        ("def f(a):\n    return a\n", "def f(a):\n    def g(): yield a\n    return g\n"),
    ),
)
def test_the_same_interface(one, other):
    trees = [fingerprint.definition(text) for text in (one, other)]
    assert fingerprint.of_interface(trees[0]) == fingerprint.of_interface(trees[1])


@pytest.mark.parametrize(
    ("one", "other"),
    (
        ("def f(a):\n    return [a]\n", "def f(a):\n    yield a\n"),
        ("def __init__(self):\n    self.x = 1\n", "def __init__(self):\n    self.y = 1\n"),
        ("def __init__(self):\n    self.register_buffer('x', t)\n", "def __init__(self):\n    g(t)\n"),
        ("def f(a=1): g()\n", "def f(a=2): g()\n"),
    ),
)
def test_another_interface(one, other):
    trees = [fingerprint.definition(text) for text in (one, other)]
    assert fingerprint.of_interface(trees[0]) != fingerprint.of_interface(trees[1])


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
    assert of(source) == "e9f96199aee7dde7"


# ---------------------------------------------------------------------- what does


# Of what these modules have less; in the libraries: tests/upstream/test_library_fingerprints.py
ENOUGH = 100
RARE = {"a removed decorator": 5, "a changed base class": 2}


@functools.cache
def bare_functions() -> list[ast.stmt]:
    return [without_texts(function) for function in FUNCTIONS]


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_noticed(kind):
    rng = random.Random(kind)
    count = 0
    for bare in rng.sample(bare_functions(), len(FUNCTIONS)):
        changed = mutated(bare, kind, rng) if count < ENOUGH else None
        if changed is not None:
            assert fingerprint.of_tree(bare) != fingerprint.of_tree(changed), ast.unparse(changed)
            count += 1
    assert count >= RARE.get(kind, 20), count


@pytest.mark.parametrize("way", REWRITINGS)
def test_no_rewriting_is(way):
    rng = random.Random(way)
    count = 0
    for text in rng.sample(TEXTS, len(TEXTS)):
        other = rewritten(text, way, rng) if count < ENOUGH else None
        if other is not None:
            assert fingerprint.of_text(text) == fingerprint.of_text(other), other
            count += 1
    assert count == ENOUGH, count


@pytest.mark.parametrize(
    ("one", "other"),
    (
        ("class A(B):\n    x = 1\n", "class A(C):\n    x = 1\n"),
        ("class A(B):\n    x = 1\n", "class A(B):\n    x = 1.0\n"),
        ("class A:\n    x: int\n", "class A:\n    y: int\n"),
        ("@d\nclass A:\n    x: int = 1\n", "@d\nclass A:\n    x = 1\n"),
        ("@d\nclass A:\n    x: ClassVar[int] = 1\n", "@d\nclass A:\n    x: int = 1\n"),
        ("@d\nclass A:\n    _: KW_ONLY\n    x: int\n", "@d\nclass A:\n    _: int\n    x: int\n"),
        ("@g.register\ndef _(a: int): pass\n", "@g.register\ndef _(a: str): pass\n"),
        ("def f():\n    x: int\n    return x\n", "def f():\n    return x\n"),
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


@pytest.mark.parametrize(
    ("one", "other"),
    (
        ("r'\\d'", "'\\\\d'"),
        ("'\\d'", "'\\\\d'"),
        ("rb'\\d\\.'", "b'\\\\d\\\\.'"),
        ("rf'\\d{a}\\w'", "f'\\\\d{a}\\\\w'"),
        ("r'\\\\d'", "'\\\\\\\\d'"),
        ("'\\\\\\d'", "r'\\\\d'"),
        ("r'\\\\\\d'", "'\\\\\\\\\\\\d'"),
    ),
)
def test_the_same_string_in_another_spelling(one, other):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert eval(one, {"a": 1}) == eval(other, {"a": 1})
    assert of(f"def f(a): return {one}\n") == of(f"def f(a): return {other}\n")


def test_what_is_no_definition_is_an_error():
    with pytest.raises(SyntaxError):
        fingerprint.of_text("def f(:\n")


def test_the_hash_of_a_text_is_short_and_takes_any_text():
    assert fingerprint.text_hash("a\udcff") == hashlib.blake2b(b"a\\udcff", digest_size=8).hexdigest()
