"""``--add NAME=RELEASE --write``: a new release decides the claims, and only what it decides is edited."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from tests.marks import rest_is_long
from tests.trees import ROOT, Tree
from tests.upstream import claims, newest
from tests.upstream.cells import TABLE, fits, read
from tests.upstream.run_cell import declarations

LIBRARIES = ("diffusers", "transformers", "accelerate", "bitsandbytes", "optimum-quanto")
SAY = "import json; from tests.upstream.run_cell import declarations; print(json.dumps(declarations()))"


def bumped(release: str) -> str:
    major, minor, *_ = release.split(".")
    return f"{major}.{int(minor) + 1}.0"


@pytest.mark.parametrize("library", rest_is_long(LIBRARIES, "diffusers"))
def test_the_newest_release_of_a_library_is_new(tmp_path, library):
    """Of the open claims every second one is fixed by the new release; one extension cannot be confirmed."""
    table, said = read(), declarations()
    last, new = table.releases[library][-1], bumped(table.releases[library][-1])
    pins = {**newest._last(table).pins, library: last}
    ending = [fix_id for fix_id in said if claims.last_seen(said[fix_id]["claims"].get(library, "")) == last]
    open_here = [fix_id for fix_id in ending if fits(said[fix_id]["claims"], pins)]
    assert len(open_here) >= 3, "there is something to decide"
    fixed = [fix_id for fix_id in open_here[::2] if not said[fix_id]["fixed_in"]]
    shy = next(fix_id for fix_id in open_here if fix_id not in fixed)
    by_hand = {shy, *(set(ending) - set(open_here))}

    tree = Tree(tmp_path / "tree")
    done = tree.run("-m", "tests.upstream.pretended", library, new, ",".join(fixed), shy)
    assert not done.stderr.count("Traceback"), done.stderr
    assert done.returncode == 1, "something is left to a person"
    now = json.loads(tree.run("-c", SAY).stdout)
    edits: dict[Path, int] = {}  # lines that a file loses or gains
    for fix_id, before in said.items():
        after = now[fix_id]
        count = edits.setdefault(claims.source(fix_id, Path()), 0)
        end, fixed_in = {True: (f"<{new}", f"{library} {new}"), False: (f"<={new}", before["fixed_in"])}[
            fix_id in fixed
        ]
        if fix_id in open_here and fix_id not in by_hand:
            assert after["claims"][library] == before["claims"][library].replace(f"<={last}", end)
            assert after["fixed_in"] == fixed_in
            assert {**after["claims"], library: ""} == {**before["claims"], library: ""}
            edits[claims.source(fix_id, Path())] = count + (3 if fix_id in fixed else 2)
        else:
            assert after == before, fix_id
            assert fix_id not in by_hand or f"\n  {fix_id}: " in done.stdout
    for file, count in edits.items():
        texts = [(folder / file).read_text().splitlines() for folder in (ROOT, tree.folder)]
        lines = [line for line in difflib.ndiff(*texts) if line.startswith(("+ ", "- "))]
        assert len(lines) == count, (file, lines)
    style = tree.run("-m", "ruff", "format", "--check", "diffusers_quantfix/fixes")
    assert style.returncode == 0 or "No module named" in style.stderr, style.stdout
    (cell,) = (
        cell
        for cell in read(tree.folder / "tests/upstream/cells.toml").cells
        if cell.pins.get(library) == new
    )
    assert f"set {cell.name} " in done.stdout and cell.pins["diffusers"]
    assert "was not confirmed" in done.stdout
    assert "with the claims as they were, by the same code: " in done.stdout
    assert tree.run("-m", "tests.upstream.tables", "--check").returncode == 0
    # Nothing but the claims, the set, the results, the supported releases and the pages.
    sources = {claims.source(fix_id, tree.folder).relative_to(tree.folder).as_posix() for fix_id in open_here}
    pages = {f"diffusers_quantfix/{name}.md" for name in ("FIXES", "COMPATIBILITY")}
    assert set(tree.changed()) <= {
        *sources,
        *pages,
        "tests/upstream/cells.toml",
        "tests/upstream/results.json",
        "diffusers_quantfix/advisories/supported.py",
        "diffusers_quantfix/fixes/index.py",
        "tests/constraints.txt",
        "README.md",
    }
    assert f"\n{library}=={new}\n" in tree.read("tests/constraints.txt")
    assert f'"{new}"),' in tree.read("diffusers_quantfix/advisories/supported.py")


def test_what_is_solved_is_written_with_its_results(tmp_path):
    """Without anything that is left to a person the results of the new set stand in the page."""
    table, said = read(), declarations()
    new = bumped(table.releases["bitsandbytes"][-1])
    tree = Tree(tmp_path / "tree")
    done = tree.run("-m", "tests.upstream.pretended", "bitsandbytes", new, "bnb-int8-reload", "none")
    name = f"D{sum(cell.name.startswith('D') for cell in table.cells) + 1:02}"
    results = json.loads(tree.read("tests/upstream/results.json"))
    assert results["bnb-int8-reload"][name].startswith("healthy "), done.stdout
    assert results["bnb-quant-state-meta"][name].startswith("patched ")
    # What was seen on the older sets still stands: the answer of no claim has changed there.
    before = json.loads((ROOT / "tests/upstream/results.json").read_text())
    assert set(before) <= set(results)
    assert all(before[fix_id].items() <= results[fix_id].items() for fix_id in said if fix_id in before)
    assert "not written" not in done.stdout


FIX_SOURCE = '''"""A fix."""

FIX = Fix(
    __doc__,
    id="a-fix",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "gguf": ""},
    patterns=("one " "two",),
    hot=True,
)
'''


def test_an_edit_changes_the_claim_and_nothing_else():
    text = claims.edited(FIX_SOURCE, claims.Change("a-fix", {"diffusers": ">=0.31.0,<=0.43.0"}))
    assert text == FIX_SOURCE.replace("<=0.42.1", "<=0.43.0")
    closed = claims.Change("a-fix", {"diffusers": ">=0.31.0,<0.43.0"}, "diffusers 0.43.0")
    text = claims.edited(FIX_SOURCE, closed)
    assert text == FIX_SOURCE.replace("<=0.42.1", "<0.43.0").replace(
        '    patterns', '    fixed_in="diffusers 0.43.0",\n    patterns'
    )  # fmt: skip
    again = claims.Change("a-fix", {"diffusers": ">=0.31.0,<0.44.0"}, "diffusers 0.44.0")
    assert claims.edited(text, again) == text.replace("0.43.0", "0.44.0")


SEVERAL = '''"""A fix."""

FIX = Fix(
    __doc__,
    id="a-fix",
    targets=(
        Target("a-fix-one", "lib.one", {"diffusers": ">=0.31.0,<=0.42.1"}),
        Target(
            "a-fix-two",
            "lib.two",
            {"diffusers": ">=0.31.0,<=0.42.1", "gguf": ""},
        ),
    ),
    frames=("one",),
)
'''


def test_an_edit_changes_one_target_and_no_other():
    longer = claims.edited(SEVERAL, claims.Change("a-fix-two", {"diffusers": ">=0.31.0,<=0.43.0"}))
    assert longer == SEVERAL.replace('0.42.1", "gguf', '0.43.0", "gguf')
    for name, end in (
        ("a-fix-one", ', fixed_in="diffusers 0.43.0"'),
        ("a-fix-two", ',\n            fixed_in="diffusers 0.43.0"'),
    ):
        closed = claims.edited(
            SEVERAL, claims.Change(name, {"diffusers": ">=0.31.0,<0.43.0"}, "diffusers 0.43.0")
        )
        old = '{"diffusers": ">=0.31.0,<=0.42.1"' + (', "gguf": ""}' if name == "a-fix-two" else "}")
        assert closed == SEVERAL.replace(old, old.replace("<=0.42.1", "<0.43.0") + end)
        again = claims.edited(
            closed, claims.Change(name, {"diffusers": ">=0.31.0,<0.44.0"}, "diffusers 0.44.0")
        )
        assert again == closed.replace("0.43.0", "0.44.0")
    with pytest.raises(ValueError, match="no target a-fix is written out"):
        claims.edited(SEVERAL, claims.Change("a-fix", {"diffusers": "<1"}))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("X = 1\n", "no FIX"),
        (FIX_SOURCE.replace('{"diffusers": ">=0.31.0,<=0.42.1", "gguf": ""}', "CLAIMS"), "no dictionary"),
        (FIX_SOURCE.replace('">=0.31.0,<=0.42.1"', "RANGE"), "no string"),
        (SEVERAL.replace("a-fix-one", "a-fix").replace("lib.one", "lib.with.a.name.as.long"), "no room"),
    ],
)
def test_a_declaration_that_cannot_be_edited_is_left_alone(source, says):
    with pytest.raises(ValueError, match=says):
        claims.edited(source, claims.Change("a-fix", {"diffusers": "<1"}, "diffusers 0.43.0"))


def decided(claim, fixed_in="", pins=None, **found):
    said = {"claims": claim, "fixed_in": fixed_in}
    seen = {"probe": "broken", "patch": "ok", "state": "failed", "why": "no device", **found}
    return claims.decide("a-fix", said, seen, pins or {"diffusers": "0.43.0", "accelerate": "1.15.0"}, read())


def test_what_one_set_cannot_decide_is_left_to_a_person():
    open_claim = {"diffusers": ">=0.31.0,<=0.42.1"}
    assert decided(open_claim)[0] == claims.Change("a-fix", {"diffusers": ">=0.31.0,<=0.43.0"})
    gone = {"probe": "healthy", "state": "healthy"}
    assert decided(open_claim, **gone)[0] == claims.Change(
        "a-fix", {"diffusers": ">=0.31.0,<0.43.0"}, "diffusers 0.43.0"
    )
    for (change, said), why in (
        (decided(open_claim, patch="the target moved: x"), "does not take: the target moved: x"),
        (decided(open_claim, probe="healthy", state="n/a"), "no test of it could run here: no device"),
        (decided(open_claim, "diffusers 0.37.0 with accelerate 1.13.0", **gone), "accelerate=1.12.0 --write"),
        (decided({**open_claim, "accelerate": "<1.13.0"}), "diffusers=0.43.0 accelerate=1.12.0 --write"),
        (decided({**open_claim, "accelerate": "<=1.14.0"}, **gone), "try them one by one"),
        (decided({**open_claim, "gguf": ""}), "the set has no gguf; try --add diffusers=0.43.0 gguf=latest"),
        (decided({"diffusers": "<0.33.0"}), "is the defect back"),
    ):
        assert change is None and why in said, said
    assert decided({"diffusers": "<0.33.0"}, **gone) == (None, "")
    assert decided({"diffusers": ">=0.31.0"}) == (None, "")


def test_a_set_stands_beside_its_kind_and_a_release_in_its_list(tmp_path):
    text = claims.with_set(
        TABLE.read_text(encoding="utf-8"), ["[[cell]]", 'name = "D99"', *(f'{n} = "9.0.0"' for n in
        ("diffusers", "transformers", "accelerate", "bitsandbytes"))], dict.fromkeys(LIBRARIES, "9.0.0"),
    )  # fmt: skip
    path = tmp_path / "cells.toml"
    path.write_text(text)
    names = [cell.name for cell in read(path).cells]
    assert names[names.index("D99") - 1] == newest._last(read()).name
    assert all(read(path).releases[library][-1] == "9.0.0" for library in LIBRARIES)
    assert max(len(line) for line in text.splitlines() if not line.startswith(("#", "note"))) <= 110
    added = [
        line for line in difflib.ndiff(TABLE.read_text().splitlines(), text.splitlines()) if line[0] == "-"
    ]
    assert len(added) <= len(LIBRARIES), "only the last line of a list may be longer"
