"""What changed in the code that fixes rely on, between two releases that are written here."""

from __future__ import annotations

import json

import pytest

from diffusers_quantfix.engine.code_marks import CALLED

from . import newest
from .changed_code import LONGEST, Release, changed

OLD = '''
import functools


def helper(
    value: int,
    factor=2,
):
    """Doc."""
    # a comment
    return value * factor


class Base:
    pass


class Model(Base):
    """A model."""

    limit = 3

    def __init__(self, size):
        self.size = size

    @functools.lru_cache
    def move(self, where):
        return helper(where)


if True:
    def twice(): return 1
else:
    def twice(): return 2
'''
PIECES = (
    "lib.one:helper", f"lib.one:helper{CALLED}", "lib.one:Model", "lib.one:Model.limit",
    f"lib.one:Model.__init__{CALLED}", "lib.one:Model.move", "lib.one:twice",
)  # fmt: skip


@pytest.fixture
def compared(tmp_path):
    """Two releases, each from the texts of its modules -> what changed."""

    def compare(old: dict[str, str], new: dict[str, str], pieces=PIECES) -> dict[str, list[str]]:
        releases = []
        for name, modules in (("lib 1.0", old), ("lib 2.0", new)):
            home = tmp_path / name
            (home / "lib").mkdir(parents=True)
            for module, text in modules.items():
                (home / "lib" / f"{module}.py").write_text(text, encoding="utf-8")
            releases.append(Release(name, home))
        return changed(pieces, *releases)

    return compare


def test_of_the_same_code_nothing_is_shown(compared):
    new = OLD.replace("Doc.", "Another text.").replace("# a comment", "# another").replace(": int", ": str")
    assert compared({"one": OLD}, {"one": new}) == {}


def test_a_changed_body_is_a_diff_of_that_function_alone(compared):
    new = OLD.replace("value * factor", "value + factor").replace("Doc.", "Another text.\n\n    Longer.")
    assert compared({"one": OLD}, {"one": new}) == {
        "lib.one:helper": [
            "--- lib 1.0", "+++ lib 2.0", "@@ -3,3 +3,3 @@",
            "     factor=2,", " ):", "-    return value * factor", "+    return value + factor",
        ]
    }  # fmt: skip


def test_of_what_is_called_the_interface_is_shown(compared):
    found = compared(
        {"one": OLD}, {"one": OLD.replace("    factor=2,", "    scale=3,").replace("* factor", "* scale")}
    )
    assert set(found) == {"lib.one:helper", "lib.one:helper()"}
    assert found["lib.one:helper()"][3:] == [
        " def helper(", "     value: int,", "-    factor=2,", "+    scale=3,", " ):"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "piece", "lines"),
    (
        ("class Model(Base)", "class Model", "lib.one:Model", ["-class Model(Base):", "+class Model:"]),
        ("limit = 3", "limit = 4", "lib.one:Model.limit", ["-limit = 3", "+limit = 4"]),
        ("self.size =", "self.extent =", "lib.one:Model.__init__()", ["-    self.size", "+    self.extent"]),
        ("    @functools.lru_cache\n", "", "lib.one:Model.move", ["-@functools.lru_cache"]),
        ("return 2", "return 3", "lib.one:twice", ["-def twice(): return 2", "+def twice(): return 3"]),
    ),
)
def test_a_change_is_shown(compared, old, new, piece, lines):
    found = compared({"one": OLD}, {"one": OLD.replace(old, new)})
    assert list(found) == [piece]
    assert [line for line in found[piece][3:] if line[0] in "+-"] == lines


def test_a_long_diff_is_cut(compared):
    body = "\n".join(f"    x{number} = value" for number in range(100))
    texts = [f"def helper(value):\n{body.replace('value', name)}\n" for name in ("value", "value + 1")]
    found = compared(*({"one": text} for text in texts), pieces=("lib.one:helper",))
    assert len(found["lib.one:helper"]) == LONGEST + 1
    assert found["lib.one:helper"][-1].endswith("more lines")


@pytest.mark.parametrize(
    ("new", "said"),
    (
        ({"one": OLD.replace("def helper", "def _helper")}, "lib.one:helper has moved to lib.one:_helper"),
        ({"one": "", "two": OLD}, "lib.one:helper has moved to lib.two:helper"),
        ({"one": "", "two": OLD.replace("Doc", "Text")}, "lib.one:helper has moved to lib.two:helper"),
        ({"one": "", "two": OLD.replace("factor=2", "factor=3")}, "lib.one:helper is gone"),
        ({}, "lib.one:helper is gone"),
    ),
)
def test_where_a_function_went(compared, new, said):
    assert compared({"one": OLD}, new, ("lib.one:helper",)) == {"lib.one:helper": [said]}


def test_a_report_names_what_goes_on_by_itself_and_shows_what_changed(tmp_path, monkeypatch):
    data = {
        "releases": {"diffusers": "0.42.1", "transformers": "5.23.0", "peft": None},
        "pieces": {"diffusers.one:f": "", "diffusers.one:g": "", "transformers.one:h": ""},
        "targets": {"a-fix": "0", "b-fix": "1 2", "c-fix": "0 2"},
    }
    (tmp_path / "data.json").write_text(json.dumps(data))
    texts = {
        "0.42.1": "def f(): return 1\ndef g(): return 1\n",
        "0.43.0": "def f(): return 1\ndef g(): return 2\n",
    }

    def sources(library, release, folder):
        home = folder / library / release
        (home / library).mkdir(parents=True)
        (home / library / "one.py").write_text(texts[release])
        return home

    monkeypatch.setattr(newest, "sources", sources)
    monkeypatch.setattr(newest.proved_code, "DATA", tmp_path / "data.json")
    why = (
        "the bug seems to be present although x; not patched: since diffusers 0.42.1 g has changed; say newer"
    )
    fixes = {
        "a-fix": {"by_itself": True},
        "b-fix": {"by_itself": False, "said": why},
        "c-fix": {"news": "retired"},
    }
    lines = newest.by_itself(fixes, {"diffusers": "0.43.0", "transformers": "5.23.0"}, tmp_path)
    assert lines == [
        "",
        "with the claims as they were, by the same code: 1 of 2 that are still there",
        "  a-fix",
        "",
        "not, since code changed on which they rely:",
        "  b-fix: since diffusers 0.42.1 g has changed",
        "",
        "  diffusers.one:g",
        "    --- diffusers 0.42.1",
        "    +++ diffusers 0.43.0",
        "    @@ -1 +1 @@",
        "    -def g(): return 1",
        "    +def g(): return 2",
    ]
    assert newest.by_itself({"c-fix": {}}, {}, tmp_path) == []
