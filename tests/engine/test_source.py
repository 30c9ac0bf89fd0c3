"""A function compiled again from its own source."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import linecache
import operator
import sys

import pytest

from diffusers_quantfix.engine.errors import ForeignPatch, TargetMissing
from diffusers_quantfix.engine.source import own_function, recompiled, statements

TEXT = '''"""A library."""


class Layer:
    @staticmethod
    def forward(x):
        if x is None:
            x = 1
        return x / y

    def chosen(self, x, y):
        if x:
            x = y.one
            y.two(x)
        try:
            x = abs(len(x))
            y = len(y)
        except TypeError:
            y = 0
        return x + y


def outer(a):
    def inner():
        return a
    return inner


y = 1
'''


class Exchange(ast.NodeTransformer):
    def visit_Assign(self, node):
        return statements("if True:\n    x = 2", node)


def imported(path, text):
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def library(tmp_path):
    return imported(tmp_path / "library.py", TEXT)


def test_one_statement_is_another_one_and_the_lines_stay(library):
    forward, before = library.Layer.forward, library.Layer.forward.__code__
    forward.__code__ = recompiled(forward, Exchange())
    assert forward(None) == 2
    assert forward(3) == 3
    code = forward.__code__
    assert (code.co_filename, code.co_firstlineno, code.co_name) == (
        before.co_filename, before.co_firstlineno, before.co_name
    )  # fmt: skip
    assert {line for _, _, line in code.co_lines() if line} <= set(range(5, 10))
    library.y = 0
    with pytest.raises(ZeroDivisionError) as error:
        forward(1)
    assert error.traceback[-1].lineno + 1 == 9


def test_a_closure_is_refused(library):
    with pytest.raises(TargetMissing, match="closure"):
        recompiled(library.outer(1), Exchange())


def test_a_library_without_its_source(library, tmp_path):
    (tmp_path / "library.py").unlink()
    linecache.clearcache()
    with pytest.raises(OSError, match=r"the source of Layer\.forward is missing"):
        recompiled(library.Layer.forward, Exchange())


def test_the_function_of_another_tool_is_refused(library, monkeypatch):
    monkeypatch.setitem(sys.modules, "library", library)
    own = library.Layer.forward
    assert own_function(library, "outer") is library.outer
    assert own_function(library, "Layer.forward") is own
    library.Layer.forward = staticmethod(functools.wraps(own)(lambda x: own(x)))
    assert own_function(library, "Layer.forward") is own, "below a wrapper that says so"
    library.Layer.forward = staticmethod(lambda x: own(x))
    with pytest.raises(
        ForeignPatch, match=r"library\.Layer\.forward was replaced by tests\.engine\.test_source before us"
    ):
        own_function(library, "Layer.forward")


METHODS = '''"""A library."""

from __future__ import annotations


class Base:
    def name(self):
        return "base"


class _Layer(Base):
    __size = 3

    def name(self):
        x = 1
        return super().name() + str(x)

    @classmethod
    def kind(cls):
        x = 1
        return __class__, cls.__size, x

    def __hidden(self):
        x = 1
        return self.__size + x

    class __Inner:
        def size(self):
            x = 1
            self.__x: int = x
            return vars(self)

    def call(self):
        return self.__hidden(), self.__Inner().size()


def made(parent):
    class Made(parent):
        def name(self):
            x = 1
            return super().name() + str(x)

        def both(self):
            x = 1
            return super().name(), parent, x

    return Made
'''


@pytest.fixture
def methods(tmp_path):
    return imported(tmp_path / "methods.py", METHODS)


def test_super_and_the_class_of_a_method_stay(methods):
    layer = methods._Layer
    for function in (layer.name, layer.kind.__func__):
        function.__code__ = recompiled(function, Exchange())
    assert layer().name() == "base2"

    class Below(layer):
        def name(self):
            return "below " + super().name()

    assert Below().name() == "below base2"
    assert Below.kind() == (layer, 3, 2)
    local = methods.made(layer)
    local.name.__code__ = recompiled(local.name, Exchange())
    assert local().name() == "base22"
    with pytest.raises(TargetMissing, match=r"Made\.both is a closure here"):
        recompiled(local.both, Exchange())


def test_private_names_are_those_of_the_class(methods):
    hidden = methods._Layer._Layer__hidden
    inner = methods._Layer._Layer__Inner.size
    for function in (hidden, inner):
        function.__code__ = recompiled(function, Exchange())
    assert methods._Layer().call() == (5, {"_Inner__x": 2})


def seen_of(code):
    """What must be the same. Not the instructions: a method of an imported module is called by others since 3.11."""
    columns: dict[int | None, int] = {}
    for line, _, column, _ in code.co_positions() if sys.version_info >= (3, 11) else ():
        columns[line] = min(columns.get(line, 999), 999 if column is None else column)
    return (
        code.co_name, getattr(code, "co_qualname", ""), code.co_flags & ~inspect.CO_NESTED, code.co_varnames,
        code.co_freevars, code.co_cellvars, sorted(code.co_names), {line for _, _, line in code.co_lines()}, columns,
        {constant for constant in code.co_consts if not hasattr(constant, "co_code")},
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["argparse", "ast", "asyncio.base_events", "logging", "pickle", "threading", "unittest.case"]
)
def test_every_method_compiled_again_without_a_change_is_the_same(name):
    module = importlib.import_module(name)
    seen = 0
    for cls in [
        value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name
    ]:
        for value in vars(cls).values():
            function = getattr(value, "__func__", value)
            if not hasattr(function, "__code__") or function.__code__.co_filename != module.__file__:
                continue
            old = function.__code__
            if old.co_name == "<lambda>" or set(old.co_freevars) - {"__class__"}:
                continue
            new = recompiled(function, ast.NodeTransformer())
            assert seen_of(new) == seen_of(old), function
            seen += 1
    assert seen > 10


def test_a_function_inside_that_another_fix_has_exchanged_stays(tmp_path):
    path = tmp_path / "nested.py"
    path.write_text(
        "def outer():\n    def inner():\n        return 'inner'\n    x = 1\n    return inner(), x\n"
    )
    spec = importlib.util.spec_from_file_location("nested", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    outer = module.outer

    def inner():
        return "ours"

    consts = (inner.__code__ if hasattr(const, "co_code") else const for const in outer.__code__.co_consts)
    outer.__code__ = outer.__code__.replace(co_consts=tuple(consts))
    outer.__code__ = recompiled(outer, Exchange())
    assert outer() == ("ours", 2)


DEFINITIONS = '''
def decorator(*_):
    return lambda function: function


@decorator()
# a comment
@decorator(
    1,
)
def decorated(a=(
    1,
    2,
)) -> """
not an end
""":
    """Text
that is not indented.
    """
# a comment that is not indented

    return (
a
    )
def next_one(): return 1
if True:
    def within(a):
        if a:
            return \\
1
# less
        return 2
    other = 1
class Last:
\tdef tabbed(self):
\t\treturn 3'''


@pytest.mark.parametrize("name", ["decorator", "decorated", "next_one", "within", "Last.tabbed"])
def test_where_a_definition_ends(tmp_path, name):
    module = imported(tmp_path / "definitions.py", DEFINITIONS)
    function = operator.attrgetter(name)(module)
    assert seen_of(recompiled(function, ast.NodeTransformer())) == seen_of(function.__code__)


def test_source_that_does_not_end_is_not_that_of_the_code(tmp_path):
    module = imported(tmp_path / "changed.py", DEFINITIONS)
    (tmp_path / "changed.py").write_text(DEFINITIONS.partition("a\n    )")[0])
    linecache.checkcache()
    with pytest.raises(OSError, match="does not end"):
        recompiled(module.decorated, ast.NodeTransformer())


CALLS = """\
import functools
def many(x):
    return functools.partial(dict, a=1, b=2, c=3, d=4, e=5, f=6, g=7, h=8, i=9, j=10, k=11, l=12, m=13, n=14, o=15, p=x)
def few(x):
    return functools.partial(max, x)
"""


@pytest.mark.parametrize("name", ["many", "few"])
def test_a_call_of_what_the_file_imports(tmp_path, name):
    function = getattr(imported(tmp_path / "calls.py", CALLS), name)
    function.__code__ = recompiled(function, ast.NodeTransformer())
    assert function(1).func is {"many": dict, "few": max}[name]


def test_a_tool_that_pads_the_code_with_instructions_that_do_nothing(library):
    """line_profiler does so."""
    import opcode

    function = library.Layer.chosen
    idle = bytes([opcode.opmap["NOP"], 0]) * 3
    function.__code__ = function.__code__.replace(co_code=function.__code__.co_code + idle)
    recompiled(function, ast.NodeTransformer())


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("forward", "return x / y", "return x * y"),
        ("forward", "return x / y", "return y / x"),
        ("forward", "x = 1\n", "x = 3\n"),
        ("forward", "x = 1\n", "y = 1\n"),
        ("forward", "x is None", "x is not None"),
        ("forward", "y = 1\n", "y = (\n"),
        ("forward", '"""A library."""\n', '"""A library."""\nfrom os import path\n'),
        ("forward", "def outer", "def inner_most():\n    pass\n\n\ndef outer"),
        ("chosen", "    y.two(x)\n", "y.two(x)\n"),  # moved out of the block
        ("chosen", "abs(len(x))", "len(abs(x))"),
        ("chosen", "        try:\n            x = abs(len(x))\n", "        x = abs(len(x))\n        try:\n"),
        ("chosen", "(self, x, y)", "(self, x, *, y)"),
        ("chosen", "(self, x, y)", "(self, x, /, y)"),
        ("chosen", "(self, x, y)", "(self, x, *y)"),
        ("chosen", "x = y.one\n            y.two(x)", "x = y.two\n            y.one(x)"),
    ],
)
def test_a_file_that_was_edited_is_taken_once_it_is_executed(tmp_path, name, old, new):
    """Before: its text of the first import, or the text of code that does not run yet."""
    library = imported(tmp_path / "library.py", TEXT)
    function = getattr(library.Layer, name)
    recompiled(function, ast.NodeTransformer())
    assert old in TEXT
    edited = TEXT.replace(old, new, 1) + "# of another length, for an edit within one tick of the clock\n"
    (tmp_path / "library.py").write_text(edited)
    is_elsewhere = "outer" in old or "(\n" in new  # this function is as it was
    if is_elsewhere:
        recompiled(function, ast.NodeTransformer())
        return
    said = "not that of the running code" + ("|does not end" if name == "forward" else "")
    with pytest.raises(OSError, match=said):
        recompiled(function, ast.NodeTransformer())
    again = getattr(imported(tmp_path / "library.py", edited).Layer, name)
    assert seen_of(recompiled(again, ast.NodeTransformer())) == seen_of(again.__code__)
