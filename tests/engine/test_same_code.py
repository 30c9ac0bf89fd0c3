"""Whether a library still has the code on which a fix was proved, on packages that are written here."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

import pytest

from diffusers_quantfix.engine.code_marks import CALLED, Files, is_same, mark
from diffusers_quantfix.engine.same_code import difference, find, moved_to

FIRST = '''
"""A library."""
import dataclasses
import functools

LIMIT = 3
NAMES = {"b": (1, 2), "a": None}


def decorated(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def helper(value, factor=2):
    """Doc."""
    return value * factor


class Base:
    def kept(self):
        return 1


class Model(Base):
    def __init__(self, size):
        self.size = size

    @property
    def device(self):
        return "cpu"

    @classmethod
    def make(cls):
        return cls(1)

    @staticmethod
    def plain():
        return 2

    @functools.cached_property
    def late(self):
        return 3

    @decorated
    def move(self, where):
        return helper(self.size)


@dataclasses.dataclass
class Options:
    one: int = 1
'''
PIECES = (
    "lib_same:LIMIT", "lib_same:NAMES", "lib_same:helper", f"lib_same:helper{CALLED}", "lib_same:Model",
    "lib_same:Model.__init__", f"lib_same:Model.__init__{CALLED}", "lib_same:Model.device", "lib_same:Model.make",
    "lib_same:Model.plain", "lib_same:Model.late", "lib_same:Model.move", "lib_same:Model.kept",
    "lib_same:Options.__init__",
)  # fmt: skip


def differences(proved: dict[str, str], files: Files, below=None) -> list[str]:
    return [phrase for name, before in proved.items() if (phrase := difference(name, before, files, below))]


def itself(owner: object, name: str, value: object) -> object:
    """What is below our patches, of which there are none."""
    return value


class Library:
    """A module on disk that can be written and imported again."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "lib_same.py"

    def write(self, text: str):
        self.file.write_text(text, encoding="utf-8")
        sys.modules.pop("lib_same", None)
        importlib.invalidate_caches()
        return importlib.import_module("lib_same")

    def marks(self, pieces=PIECES) -> dict[str, str]:
        files = Files()
        return {name: mark(name, find(name.removesuffix(CALLED)), files) for name in pieces}


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Library(tmp_path)
    sys.modules.pop("lib_same", None)


def changed(library: Library, *exchanges: tuple[str, str]) -> list[str]:
    library.write(FIRST)
    proved = library.marks()
    assert all(proved.values())
    text = FIRST
    for old, new in exchanges:
        assert old in text
        text = text.replace(old, new)
    library.write(text)
    return [phrase.replace("lib_same:", "") for phrase in differences(proved, Files())]


def test_the_same_code_is_the_same(library):
    assert changed(library) == []


def test_comments_docstrings_and_what_is_above_do_not_matter(library):
    assert (
        changed(
            library,
            ('"""Doc."""', '"""Another text.\n\n    With more lines."""  # and a comment'),
            ("import dataclasses", "import dataclasses\nimport os\n\n\ndef new():\n    return os\n"),
            ("def make(cls):", "def make(cls) -> 'Model':"),
            ('return "cpu"', "return 'cpu'"),
        )
        == []
    )


@pytest.mark.parametrize(
    ("old", "new", "phrases"),
    (
        ("LIMIT = 3", "LIMIT = 4", ["LIMIT has changed"]),
        ('"a": None', '"a": 0', ["NAMES has changed"]),
        ("value * factor", "value + factor", ["helper has changed"]),
        ("factor=2", "factor=3", ["helper has changed"] * 2),
        ("self.size = size", "self.size = size + 1", ["Model.__init__ has changed"]),
        ("self.size = size", "self.size = size\n        self.size += 1", ["Model.__init__ has changed"]),
        (
            "return 2",
            "return 2\n\n    # more\n        # lines\n\n        yield 1",
            ["Model.plain has changed"],
        ),
        ("self.size = size", "self.extent = size", ["Model.__init__ has changed"] * 2),
        ("class Model(Base):", "class Model:", ["Model has changed", "Model.kept is gone"]),
        ('return "cpu"', 'return "meta"', ["Model.device has changed"]),
        ("return cls(1)", "return cls(2)", ["Model.make has changed"]),
        ("return 2", "return 4", ["Model.plain has changed"]),
        ("return 3", "return 4", ["Model.late has changed"]),
        ("helper(self.size)", "helper(where)", ["Model.move has changed"]),
        ("    @decorated\n", "", ["Model.move has changed"]),
        ("one: int", "two: int", ["Options.__init__ has changed"]),
        ("def plain", "def simple", ["Model.plain is gone"]),
    ),
)
def test_a_change_is_named(library, old, new, phrases):
    assert changed(library, (old, new)) == phrases


SUBTLE = """
import enum
import functools
import re

LIMIT = 3
FLAGS = {"one": True}
PATTERN = re.compile("a+")
TABLE = {"one": len}


class Kind(enum.Enum):
    A = 1
    B = 2


DEFAULT = Kind.A


def without_wraps(function):
    def inner(*args):
        return function(*args)

    return inner


@without_wraps
def hidden(value):
    return value


def factory(size):
    def made(value):
        return value * size

    return made


made = factory(3)
part = functools.partial(factory, 3)


class Meta(type):
    pass


class Base:
    def move(self):
        return 1

    __slots__ = ("a",)


class Model(Base, metaclass=Meta):
    limit = True

    @property
    def device(self):
        return self.place

    @device.setter
    def device(self, value):
        self.place = value

    later = functools.partialmethod(Base.move)


def walked(values):
    return [value for value in values]
"""


@pytest.mark.parametrize(
    ("piece", "old", "new"),
    (
        pytest.param("FLAGS", "True}", "False}", id="a truth in a table"),
        pytest.param("PATTERN", "a+", "a*", id="a regular expression"),
        pytest.param("PATTERN", '"a+"', '"a+", re.I', id="its flags"),
        pytest.param("TABLE", "len", "max", id="a function in a table"),
        pytest.param("DEFAULT", "DEFAULT = Kind.A", "DEFAULT = Kind.B", id="a member of an enumeration"),
        pytest.param("hidden", "    return value\n\n\ndef factory", "    return -value\n\n\ndef factory",
                     id="below a decorator that does not use wraps"),
        pytest.param("hidden", "return function(*args)", "return function(*args[:1])", id="such a decorator"),
        pytest.param("made", "made = factory(3)", "made = factory(4)", id="what a closure holds"),
        pytest.param("part", "partial(factory, 3)", "partial(factory, 4)", id="what a partial holds"),
        pytest.param("Model", "Model(Base, metaclass=Meta)", "Model(Base)", id="a metaclass"),
        pytest.param("Base", '("a",)', '("a", "b")', id="slots"),
        pytest.param("Model", "    limit = True", "    def __getattr__(self, name): pass", id="a special method"),
        pytest.param("Model.limit", "limit = True", "limit = False", id="a truth in a class"),
        pytest.param("Model.device", "self.place = value", "self.place = None", id="a setter"),
        pytest.param("Model.device()", "device(self, value)", "device(self, other)", id="its interface"),
        pytest.param("Model.move", "    limit = True", "    def move(self):\n        return 2", id="an override"),
        pytest.param("walked()", "return [value for value in values]", "yield from values", id="a generator"),
    ),
)  # fmt: skip
def test_a_subtle_change_is_noticed(library, piece, old, new):
    library.write(SUBTLE)
    name = f"lib_same:{piece}"
    proved = library.marks((name,))
    assert all(proved.values())
    assert differences(proved, Files()) == []
    assert SUBTLE.count(old) == 1
    library.write(SUBTLE.replace(old, new))
    assert differences(proved, Files()) == [f"{name.removesuffix(CALLED)} has changed"]


def test_what_only_a_class_prints_does_not_matter(library):
    library.write(SUBTLE)
    proved = library.marks(("lib_same:Model",))
    library.write(SUBTLE.replace("    limit = True", "    limit = True\n    def __repr__(self): return ''"))
    assert differences(proved, Files()) == []


def test_a_special_method_of_ours_is_no_change(library):
    """Another fix has put one into a class that has none, and has replaced one that it has."""
    text = SUBTLE.replace("    limit = True", "    def __getattr__(self, name): pass")
    model = library.write(text).Model
    proved = library.marks(("lib_same:Model",))
    upstream = vars(model)["__getattr__"]
    model.__getattr__ = lambda self, name: name
    model.__deepcopy__ = lambda self, memo: self

    def below(owner, name, value):
        return {"__getattr__": upstream, "__deepcopy__": None}.get(name, value)

    assert differences(proved, Files(), below) == []
    assert differences(proved, Files(), itself) == ["lib_same:Model has changed"]


def test_what_replaces_a_method_of_another_library_counts_itself(library):
    """``functools.wraps`` says that it wraps that of the other library."""
    text = """
import functools, textwrap


class Model(textwrap.TextWrapper):
    @functools.wraps(textwrap.TextWrapper.fill)
    def fill(self, text):
        return text
"""
    library.write(text)
    proved = library.marks(("lib_same:Model.fill",))
    library.write(text.replace("return text", "return text[1:]"))
    assert differences(proved, Files()) == ["lib_same:Model.fill has changed"]


def test_of_another_library_the_name_counts(library):
    text = "from textwrap import dedent, indent\nfrom textwrap import TextWrapper as One\n"
    library.write(text)
    pieces = ("lib_same:dedent", "lib_same:One")
    proved = library.marks(pieces)
    assert list(proved.values()) == ["of textwrap dedent", "of textwrap TextWrapper"]
    library.write(text.replace("dedent, indent", "indent as dedent"))
    assert differences(proved, Files()) == ["lib_same:dedent has changed"]


def test_code_is_found_where_it_is_looked_up(package):
    """Imported from another module of the library: the same where it only moved, a change where it is another."""
    package(one=MOVES, two="from lib_moves.one import helper\n")
    name = "lib_moves.two:helper"
    proved = {name: mark(name, find(name), Files())}
    package(three=MOVES, two="from lib_moves.three import helper\n")
    assert differences(proved, Files()) == []
    package(
        one=MOVES, three=MOVES.replace("* factor", "+ factor"), two="from lib_moves.three import helper\n"
    )
    assert differences(proved, Files()) == [f"{name} has changed"]


def test_an_object_that_has_any_attribute_wraps_nothing(library):
    library.write("class Any:\n    def __getattr__(self, name): return self\n\n\nANY = Any()\n")
    assert library.marks(("lib_same:ANY",))["lib_same:ANY"].startswith("value ")


def test_lines_of_windows_are_the_same_code(library):
    library.write(FIRST)
    proved = library.marks()
    library.file.write_bytes(FIRST.replace("\n", "\r\n").encode())
    assert differences(proved, Files()) == []


def test_what_was_not_imported_is_gone(library):
    library.write(FIRST)
    proved = library.marks(("lib_same:LIMIT",))
    del sys.modules["lib_same"]
    assert differences(proved, Files()) == ["lib_same:LIMIT is gone"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes the modules of a package anew and imports them: name -> text."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(**modules: str) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "lib_moves"]:
            del sys.modules[name]
        (tmp_path / "lib_moves").mkdir(exist_ok=True)
        importlib.invalidate_caches()
        for name, text in {"__init__": "", **modules}.items():
            (tmp_path / "lib_moves" / f"{name}.py").write_text(text, encoding="utf-8")
        for name in modules:
            importlib.import_module(f"lib_moves.{name}")

    yield write
    write()  # forgets them


MOVES = '''
def helper(value, factor=2):
    """Doc."""
    return [value * factor for _ in range(3)]


def other(value):
    return value


class Model:
    def move(self, where):
        self.where = where
        return self
'''
HELPER = "lib_moves.one:helper"
MOVE = "lib_moves.one:Model.move"


@pytest.mark.parametrize(
    ("piece", "modules", "place"),
    (
        pytest.param(
            HELPER, {"one": MOVES.replace("def helper", "def _helper")}, "lib_moves.one:_helper", id="renamed"
        ),
        pytest.param(HELPER, {"one": "", "two": MOVES}, "lib_moves.two:helper", id="moved"),
        pytest.param(
            HELPER + CALLED, {"one": "", "two": MOVES.replace("value *", "-value *")}, "lib_moves.two:helper",
            id="moved, of which the interface counts",
        ),
        pytest.param(
            HELPER, {"one": "", "two": MOVES.replace("Doc.", "A longer text.\n\n    Of more lines.")},
            "lib_moves.two:helper", id="moved and documented",
        ),
        pytest.param(MOVE, {"one": "", "two": MOVES}, "lib_moves.two:Model.move", id="its class moved"),
        pytest.param(
            MOVE, {"one": MOVES.replace("class Model", "class Thing")}, "lib_moves.one:Thing.move",
            id="its class was renamed",
        ),
        pytest.param(
            MOVE, {"one": MOVES.replace("def move", "def move_to")}, "lib_moves.one:Model.move_to",
            id="a renamed method",
        ),
        pytest.param(
            MOVE, {"one": "def move(self, where):\n    self.where = where\n    return self\n"},
            "lib_moves.one:move", id="a method became a function",
        ),
        pytest.param(HELPER, {"one": "", "two": MOVES.replace("factor=2", "factor=3")}, "", id="and changed"),
        pytest.param(HELPER, {"one": "", "two": MOVES.replace("def helper", "def f")}, "", id="both"),
        pytest.param(HELPER, {"one": ""}, "", id="gone"),
    ),
)  # fmt: skip
def test_where_a_function_is_that_moved(package, piece, modules, place):
    package(one=MOVES)
    proved = mark(piece, find(piece.removesuffix(CALLED)), Files())
    package(**modules)
    assert difference(piece, proved, Files()) == f"{piece.removesuffix(CALLED)} is gone"
    assert moved_to(piece, proved, itself) == place


def test_a_constant_that_is_gone_is_not_looked_for(package):
    package(one="LIMIT = 3\n")
    proved = mark("lib_moves.one:LIMIT", find("lib_moves.one:LIMIT"), Files())
    package(one="LIMITS = 3\n")
    assert moved_to("lib_moves.one:LIMIT", proved, itself) == ""


def test_of_another_library_nothing_has_moved(package, library):
    package(one=MOVES)
    proved = mark(HELPER, find(HELPER), Files())
    package(one="")
    library.write(MOVES)
    assert moved_to(HELPER, proved, itself) == ""


def test_the_wrapper_of_another_tool_is_a_change_and_our_own_patch_is_none(library):
    module = library.write(FIRST)
    proved = library.marks(("lib_same:helper",))
    upstream = module.helper

    @functools.wraps(upstream)
    def patched(*args, **kwargs):
        return upstream(*args, **kwargs)

    module.helper = patched
    assert differences(proved, Files()) == [f"lib_same:helper was replaced by code of {__name__}"]
    assert differences(proved, Files(), lambda owner, name, value: upstream) == []


def test_without_sources_nothing_is_the_same(library):
    library.write(FIRST)
    proved = library.marks(("lib_same:helper", "lib_same:LIMIT"))
    library.file.unlink()
    assert differences(proved, Files()) == ["lib_same:helper has no source that can be read"]


def test_nothing_is_parsed_where_the_text_is_the_same(library, monkeypatch):
    library.write(FIRST)
    proved = library.marks()
    from diffusers_quantfix.engine import fingerprint

    def fail(*_: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(fingerprint, "definition", fail)
    monkeypatch.setattr(fingerprint, "block_at", fail)
    assert differences(proved, Files()) == []


def test_each_file_is_read_once(library, monkeypatch):
    library.write(FIRST)
    proved = library.marks()
    opened = []
    from diffusers_quantfix.engine import code_marks

    def counted(*args, **kwargs):
        opened.append(args)
        return open(*args, **kwargs)

    monkeypatch.setattr(code_marks, "open", counted, raising=False)
    assert differences(proved, Files()) == []
    assert len(opened) == 1


def test_nothing_is_never_the_same():
    assert not is_same("", "")
    assert not is_same("1 a b", "")
