"""``python -m tests.new_fix``: a made-up defect of a made-up release, from the command to the generated pages."""

from __future__ import annotations

import json

import pytest

from diffusers_quantfix.fixes.targets import TARGETS
from tests.new_fix import files, stubs
from tests.trees import Tree

ID = "accelerate-made-up"
ASKED = (
    "-m", "tests.new_fix", ID, "--target", "accelerate.made_up", "--title", "halve() rounds down",
    "--symptom", "halve(3) is 1", "--claims", "accelerate<=9.9.1,>=9.0",
    "--upstream", "https://github.com/huggingface/accelerate/issues/1",
)  # fmt: skip
FIX = "diffusers_quantfix/fixes/accelerate/made_up.py"
TEST = "tests/fixes/test_accelerate_made_up.py"
CASE = "diffusers_quantfix/verify/cases/accelerate_made_up.py"
BY_HAND = [FIX, TEST, CASE, "CHANGELOG.md"]


@pytest.mark.parametrize("fix_id", TARGETS)
def test_no_stub_is_left(fix_id):
    places = files.to_fill_in(files.files_of(fix_id))
    assert not places, "\n".join(places)


def test_no_stub_is_left_in_the_changelog():
    places = files.to_fill_in(["CHANGELOG.md"])
    assert not places, "\n".join(places)


@pytest.fixture
def tree(tmp_path):
    """A copy of the project beside accelerate 9.9.1, which has a defect."""
    release = tmp_path / "release"
    (release / "accelerate").mkdir(parents=True)
    (release / "accelerate" / "__init__.py").write_text("")
    (release / "accelerate" / "made_up.py").write_text("def halve(number):\n    return number // 2\n")
    (release / "accelerate-9.9.1.dist-info").mkdir()
    (release / "accelerate-9.9.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: accelerate\nVersion: 9.9.1\n"
    )
    tree = Tree(tmp_path / "tree")
    paths = f"{tree.folder}:{release}"
    tree.ask = lambda *words: tree.run(*words, PYTHONPATH=paths)
    return tree


def pytest_of(tree, *words):
    done = tree.ask("-m", "pytest", "-q", "-p", "no:cacheprovider", *words)
    return done.returncode, done.stdout + done.stderr


def fill_in(tree, name, *changes):
    path = tree.folder / name
    text = path.read_text()
    for old, new in changes:
        assert old in text, f"{name} has no {old!r}"
        before, _, after = text.partition(old)
        text = before + new + after
    path.write_text(text)


def up_to(text, start, end=None):
    """The part of a stub from one text to another, or to its end."""
    found = text[text.index(start) :]
    return found if end is None else found[: found.index(end)]


@pytest.mark.long
def test_a_new_fix_from_the_command_to_the_pages(tree):
    done = tree.ask(*ASKED)
    assert done.returncode == 0, done.stderr
    index = "diffusers_quantfix/fixes/index.py"
    assert sorted(tree.changed()) == sorted([*BY_HAND, index])

    # The stubs fail, and say where.
    for side in ("bare", "patched"):
        code, said = pytest_of(tree, TEST, "--side", side)
        assert code == 1 and ("FILL IN" in said), said
    code, said = pytest_of(tree, "tests/test_new_fix.py", "-k", "no_stub_is_left")
    assert code == 1
    for name in BY_HAND:
        assert f"{name}:" in said and f"\n  {name}:" in done.stdout, name
    # The command `status` imports every library first, which takes longer than all of the rest here.
    board = "json.dumps(diffusers_quantfix.status(load=False).to_dict())"
    status = tree.ask("-c", f"import json, accelerate.made_up, diffusers_quantfix; print({board})")
    (answer,) = (fix for fix in json.loads(status.stdout)["fixes"] if fix["id"] == ID)
    assert answer["state"] == "failed" and "FILL IN: broken()" in answer["reason"], "no stub patches anything"

    # A person fills in four files; title, symptom, range and link stand everywhere already.
    stub = tree.read(FIX)
    fill_in(
        tree, FIX,
        ("FILL IN: which lines of upstream do what.", "``halve`` divides with ``//``."),
        ("FILL IN: what is replaced, and why there.", "``halve`` itself."),
        (up_to(stub, '    # FILL IN: "wrong result"', "    since="),
         '    harm="wrong result",\n    frames=("made_up.py:halve",),\n'),
        (up_to(stub, '    """FILL IN: how'), '    """Halve an odd number."""\n'
         '    return bool(made_up.halve(3) == 1)\n\n\n'
         "def patch(made_up: ModuleType, draft: Draft) -> None:\n"
         '    draft.replace(made_up, "halve", lambda number: number / 2)\n'),
    )  # fmt: skip
    stub = tree.read(TEST)
    fill_in(tree, TEST, (up_to(stub, '    """FILL IN'), "    from accelerate.made_up import halve\n\n"
            '    assert halve(3) == 1.5, f"halve(3) is {halve(3)}"\n'))  # fmt: skip
    stub = tree.read(CASE)
    fill_in(
        tree, CASE,
        (up_to(stub, '"""FILL IN', "\n"), '"""An odd number is halved."""'),
        (up_to(stub, '    """FILL IN'), "    from accelerate.made_up import halve\n\n"
         '    assert halve(3) == 1.5, f"halve(3) is {halve(3)}"\n    return "halve(3) is 1.5"\n'),
    )  # fmt: skip
    fill_in(tree, "CHANGELOG.md", ("FILL IN: what works now.", "`halve` is exact."))

    # Red without us, green with us, and the project is whole again.
    for side in ("bare", "patched"):
        code, said = pytest_of(tree, TEST, "--side", side)
        assert code == 0 and "1 passed" in said, said
    shape = (
        "tests/test_new_fix.py",
        "tests/engine/test_shape.py",
        "-k",
        "no_stub_is_left or made_up or listed",
    )
    code, said = pytest_of(tree, *shape)
    assert code == 0, said
    assert tree.ask("-m", "diffusers_quantfix.fixes.accelerate.made_up").returncode == 0
    for tool in (["ruff", "check"], ["ruff", "format", "--check"]):
        style = tree.ask("-m", *tool, FIX, TEST, CASE, index)
        assert style.returncode == 0 or "No module named" in style.stderr, style.stdout + style.stderr
    assert tree.ask("-m", "tests.upstream.tables", "--check").returncode == 1
    assert tree.ask("-m", "tests.upstream.tables", "--write").returncode == 0
    row = next(line for line in tree.read("diffusers_quantfix/FIXES.md").splitlines() if ID in line)
    assert all(fact in row for fact in ("halve(3) is 1", "accelerate >=9.0, &lt;=9.9.1", "accelerate#1"))
    row = next(line for line in tree.read("diffusers_quantfix/COMPATIBILITY.md").splitlines() if ID in line)
    assert set(row.split("|")[2:-1]) == {" ? "}, "not run on any set yet"
    pages = [f"diffusers_quantfix/{name}.md" for name in ("FIXES", "COMPATIBILITY")]
    assert sorted(tree.changed()) == sorted([*BY_HAND, index, *pages]), "four files by hand"


def test_nothing_is_written_where_the_request_makes_no_sense(tree):
    target = ("--target", "accelerate.made_up")
    (tree.folder / FIX).touch()
    for words, says in (
        (("made-up", *target), "is no id"),
        (("accelerate_made_up", *target), "is no id"),
        (
            ("bnb-quant-state-code", "--target", "bitsandbytes.functional"),
            "there is a fix bnb-quant-state-code",
        ),
        ((ID, "--target", "diffusers.models"), "is no module of accelerate"),
        ((ID, *target, "--claims", "accelerate=>1"), "error: "),
        (("accelerate-hooks", *target, "--claims", "accelerate"), ""),
        (("accelerate-hooks", *target, "--claims", "accelerate"), "there is a fix"),
        ((ID, *target, "--claims", "accelerate"), "there is a file"),
    ):
        done = tree.ask("-m", "tests.new_fix", *words)
        assert done.returncode == (2 if says else 0), done.stderr
        assert says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("target", "title", "symptom"),
    [
        ("accelerate.a b", "title", "symptom"),
        ("accelerate.", "title", "symptom"),
        ("accelerate.hooks", "two\nlines", "symptom"),
        ("accelerate.hooks", "", "symptom"),
        ("accelerate.hooks", "title", 'three """ marks'),
    ],
)
def test_nothing_is_written_that_python_cannot_read(tmp_path, target, title, symptom):
    new = stubs.Draft(ID, target, title, symptom, {"accelerate": "<=9.9.1"}, ())
    with pytest.raises(ValueError, match=r"would be no Python|a title"):
        stubs.start(new, tmp_path)


def test_a_fix_of_every_library_can_be_started():
    assert {fix_id.partition("-")[0] for fix_id in TARGETS} <= set(stubs.LIBRARIES)


def test_what_is_installed_ends_the_claim_and_a_link_is_named_in_words(tree):
    assert tree.ask("-m", "tests.new_fix", ID, "--target", "accelerate.made_up").returncode == 0
    claim = '    # FILL IN: the first affected release too\n    claims={"accelerate": "<=9.9.1"},\n'
    assert claim in tree.read(FIX)
    assert "Upstream: not reported." in tree.read(FIX)
    assert tree.read("CHANGELOG.md").count(f"`{ID}`: FILL IN: what works now. Not reported upstream.") == 1


def test_the_line_of_the_index_stands_in_its_place():
    for fix_id in ("accelerate-aaa", "quanto-zzz", "transformers-zzz", "bnb-int8-reload-again"):
        folder, module, _ = stubs.LIBRARIES[fix_id.partition("-")[0]]
        new = stubs.Draft(fix_id, f"{module}.some", "t", "s", {"lib": "<=1"}, ())
        text = stubs.with_index_line(new)
        scope: dict = {}
        exec(text, scope)
        assert [row[0] for row in scope["ROWS"]] == sorted({*TARGETS, fix_id})
        (row,) = (row for row in scope["ROWS"] if row[0] == fix_id)
        assert row == (fix_id, f"{module}.some", (("lib", "<=1"),), "", fix_id, f"{folder}.{new.name}")
        before = (files.ROOT / files.INDEX_FILE).read_text()
        assert [line for line in text.splitlines() if line not in before.splitlines()] == [
            line for line in text.splitlines() if f'"{fix_id}"' in line
        ]


def test_the_line_of_the_changelog_stands_among_its_neighbours():
    text = (files.ROOT / "CHANGELOG.md").read_text()
    for fix_id, target, neighbour in (
        ("quanto-new", "optimum.quanto.nowhere", "quanto-int4-cpu"),
        ("diffusers-new", "diffusers.hooks.group_offloading", "diffusers-group-offload-guard"),
        ("transformers-new", "transformers.nowhere", ""),
    ):
        changed = stubs.with_changelog_line(text, stubs.Draft(fix_id, target, "t", "s", {}, ()))
        line = f"- `{fix_id}`: FILL IN: what works now. Not reported upstream.\n"
        assert changed.replace(line, "") == text
        section = next(part for part in changed.split("\n### ") if line in part)
        assert not neighbour or f"- `{neighbour}`" in section


def named_in(printed: str) -> set[str]:
    """The files that the printed report says still name a fix."""
    return {line.split(":")[0].strip() for line in printed.partition("still named")[2].splitlines()[1:]}


@pytest.mark.long
def test_a_fix_is_taken_out_everywhere(tree):
    """What the command for a new one has written is gone again, and so is a fix that was finished."""
    assert tree.ask(*ASKED).returncode == 0
    done = tree.ask("-m", "tests.new_fix", ID, "--remove")
    assert done.returncode == 0, done.stderr
    assert tree.changed() == []
    assert named_in(done.stdout) == {"tests/test_new_fix.py"}

    gone = "bnb-quant-state-code"
    done = tree.ask("-m", "tests.new_fix", gone, "--remove")
    assert done.returncode == 0, done.stderr
    for name in files.files_of(gone):
        assert not (tree.folder / name).exists() and f"\n  {name}" in done.stdout
    pages = [*files.PAGES, files.INDEX_FILE, files.CHANGELOG, files.ERRORS, files.RESULTS]
    for name in pages:
        assert f'"{gone}"' not in tree.read(name) and f"\n  {name}" in done.stdout
    assert f"=== {gone} " not in tree.read(files.ERRORS) and json.loads(tree.read(files.RESULTS))
    assert sorted(tree.changed()) == sorted(pages), "nothing else is changed"
    assert tree.ask("-m", "tests.upstream.tables", "--check").returncode == 0
    assert "tests/tools/test_explain.py" in named_in(done.stdout), "a person decides about what else names it"

    for name, says in (
        ("no-such-fix", "no fix"),
        ("peft-unmerge-hira", "a target of peft-unmerge-bitsandbytes"),
    ):
        done = tree.ask("-m", "tests.new_fix", name, "--remove")
        assert done.returncode == 2 and says in done.stderr
