"""A function compiled again from its own source."""

from __future__ import annotations

import ast
import functools
import importlib.util
import linecache
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


def outer(a):
    def inner():
        return a
    return inner


y = 1
'''


class Exchange(ast.NodeTransformer):
    def visit_Assign(self, node):
        return statements("if True:\n    x = 2", node)


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "library.py"
    path.write_text(TEXT, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("library", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
