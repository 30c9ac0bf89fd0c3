"""`check`: every kind of input, the three exit codes, and nothing imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from packaging.version import Version

from diffusers_quantfix.advisories.findings import AFFECTED, MAYBE, findings, table
from diffusers_quantfix.advisories.supported import RELEASES, TORCH
from diffusers_quantfix.advisories.upgrades import upgrades

CODE = "bnb-quant-state-code"  # bitsandbytes >=0.43.0,<0.45.3


def check(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diffusers_quantfix", "check", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("==0.45.2", AFFECTED),
        ("==0.45.3", None),
        ("==0.43.0", AFFECTED),
        ("==0.42.0", None),
        ("==0.45.2+local", AFFECTED),
        ("===0.45.2", AFFECTED),
        ("==0.45.*", MAYBE),
        (">=0.45", MAYBE),
        ("", MAYBE),
        (">=0.45.3", None),
        ("~=0.45.1", MAYBE),
        ("<0.43", None),
        (">0.45.2,<0.45.3", None),
    ],
)
def test_pins_and_ranges(version, verdict):
    found = {finding.id: finding.verdict for finding in findings({"bitsandbytes": version})}
    assert found.get(CODE) == verdict


def test_a_defect_that_is_patched_by_the_same_file_is_listed_and_no_failure():
    bare = check("-", stdin="bitsandbytes==0.45.2\n")
    assert bare.returncode == 1
    assert CODE in bare.stdout
    assert "bitsandbytes 0.45.3" in bare.stdout
    patched = check("-", "--json", stdin="bitsandbytes==0.45.2\ndiffusers_quantfix==0.1.0\n")
    found = json.loads(patched.stdout)
    assert patched.returncode == 0
    assert found["ok"]
    assert next(f for f in found["findings"] if f["id"] == CODE)["patched"]
    clean = check("-", stdin="bitsandbytes==0.42.0\n")
    assert (clean.returncode, clean.stdout.strip()) == (0, "no known bug in these versions")


@pytest.mark.parametrize(
    ("ours", "patched"),
    [
        ("diffusers-quantfix==0.1.0", True),
        ("Diffusers_Quantfix", True),
        ("diffusers-quantfix>=0.1,<1", True),
        ("diffusers-quantfix==99", True),
        ("diffusers-quantfix==0.0.9", False),
        ("diffusers-quantfix<0.1", False),
        ("numpy", False),
    ],
)
def test_only_a_release_of_ours_that_has_the_fix_patches_it(ours, patched):
    done = check("-", stdin=f"bitsandbytes==0.45.2\n{ours}\n")
    assert done.returncode == (0 if patched else 1)
    assert any(line.startswith("patched  ") for line in done.stdout.splitlines()) == patched


UV_LOCK = """version = 1
[[package]]
name = "bitsandbytes"
version = "{}"
[[package]]
name = "bitsandbytes"
version = "{}"
"""
POETRY = '[tool.poetry.dependencies]\nbitsandbytes = "{}"\n'


@pytest.mark.parametrize(
    ("name", "text", "code", "verdict"),
    [
        ("uv.lock", UV_LOCK.format("0.45.2", "0.45.1"), 1, AFFECTED),
        ("uv.lock", UV_LOCK.format("0.45.2", "99.0"), 1, MAYBE),
        ("uv.lock", UV_LOCK.format("0.41.0", "0.40.0"), 0, None),
        ("pyproject.toml", POETRY.format("0.45.1 || 0.45.2"), 1, AFFECTED),
        ("pyproject.toml", POETRY.format("<0.42 || ^0.45"), 1, MAYBE),
        ("pyproject.toml", POETRY.format("0.40.0 || 0.41.0"), 0, None),
        ("r.txt", "bitsandbytes===foo\n", 1, MAYBE),
        ("uv.lock", UV_LOCK.format("foo", "foo"), 1, MAYBE),
        ("r.txt", "numpy===foo\n", 0, None),
    ],
)
def test_a_pin_of_several_versions_or_of_one_that_cannot_be_compared(tmp_path, name, text, code, verdict):
    (tmp_path / name).write_text(text)
    done = check(tmp_path / name, "--json")
    assert (done.returncode, done.stderr) == (code, "")
    found = {finding["id"]: finding["verdict"] for finding in json.loads(done.stdout)["findings"]}
    assert found.get(CODE) == verdict
    assert bool(found) == bool(code)


def test_each_version_of_a_pin_is_held_against_the_newest_that_is_known(tmp_path):
    (tmp_path / "uv.lock").write_text(UV_LOCK.format("0.45.2", "99.0"))
    notes = json.loads(check(tmp_path / "uv.lock", "--json").stdout)["notes"]
    newer = [note for note in notes if "newer than" in note]
    assert [note.partition(" is ")[0] for note in newer] == ["bitsandbytes 99.0"]


def test_a_torch_that_was_not_tested():
    oldest, newest = TORCH
    for version, said in (("2.4.1+cu121", f"older than {oldest}"), ("2.99.0", f"newer than {newest}")):
        done = check("-", "--json", stdin=f"torch=={version}\ndiffusers==0.36.0\n")
        (note,) = json.loads(done.stdout)["notes"]
        assert note.startswith(f"torch {version} is {said}, the ") and "diffusers_quantfix verify" in note
    for inside in (f"=={oldest}", f"=={newest}+cu130", ">=2.4", ""):
        done = check("-", "--json", stdin=f"torch{inside}\ndiffusers==0.36.0\n")
        assert json.loads(done.stdout)["notes"] == []


def test_a_constraint_installs_nothing(tmp_path):
    (tmp_path / "limits.txt").write_text("diffusers-quantfix==0.1.0\n")
    (tmp_path / "r.txt").write_text("-c limits.txt\nbitsandbytes==0.45.2\n")
    assert check(tmp_path / "r.txt").returncode == 1
    (tmp_path / "r.txt").write_text("-c limits.txt\nbitsandbytes==0.45.2\ndiffusers-quantfix\n")
    assert check(tmp_path / "r.txt").returncode == 0


def test_several_files_are_one_set(tmp_path):
    (tmp_path / "a.txt").write_text("bitsandbytes>=0.45\n")
    (tmp_path / "b.txt").write_text("bitsandbytes==0.45.2\n")
    found = json.loads(check(tmp_path / "a.txt", tmp_path / "b.txt", "--json").stdout)
    assert {f["id"]: f["verdict"] for f in found["findings"]}[CODE] == AFFECTED
    assert found["pins"] == {"bitsandbytes": ">=0.45,==0.45.2"}


def test_what_nobody_names_is_not_guessed():
    ids = {finding.id for finding in findings({"diffusers": "==0.33.1"})}
    assert "diffusers-8bit-move-gate" not in ids, "needs bitsandbytes, which a user would name"
    assert "diffusers-8bit-offload-detection" in ids, "needs accelerate, which others bring"
    locked = {finding.id for finding in findings({"diffusers": "==0.33.1"}, complete=True)}
    assert "diffusers-8bit-offload-detection" not in locked, "a lock file would name accelerate"


def test_the_smallest_upgrade_of_each_library():
    pins = {"bitsandbytes": "==0.45.2", "diffusers": "==0.33.1", "accelerate": "==1.6.0"}
    found = {str(upgrade).partition(" fixes ")[0]: upgrade for upgrade in upgrades(pins, findings(pins))}
    assert found["bitsandbytes 0.45.3"].fixes == [CODE]
    assert set(found["bitsandbytes 0.48.1"].fixes) >= {CODE, "bnb-int8-requantize"}, (
        "the smaller ones included; not 0.48.0, which breaks 8-bit checkpoints"
    )
    assert not any("0.48.0" in upgrade.releases.values() for upgrade in found.values())
    assert "diffusers-8bit-offload-detection" in found["diffusers 0.34.0"].fixes
    assert not set(found["bitsandbytes 0.45.3"].brings) & {finding.id for finding in findings(pins)}
    shown = check("-", stdin="bitsandbytes==0.45.2\n").stdout
    assert "bitsandbytes 0.45.3 fixes bnb-quant-state-code" in shown


def test_releases_that_only_fix_together():
    """Inside the claim, which cannot say "or": diffusers-8bit-model-gate."""

    def said(diffusers: str, bitsandbytes: str) -> str | None:
        found = findings({"diffusers": diffusers, "bitsandbytes": bitsandbytes})
        return {finding.id: finding.verdict for finding in found}.get("diffusers-8bit-model-gate")

    assert said("==0.36.0", "==0.50.2") == said("==0.42.1", "==0.45.5") == AFFECTED
    assert said("==0.37.0", "==0.48.0") is None
    assert said("==0.37.0", ">=0.45") == MAYBE
    pins = {"diffusers": "==0.36.0", "bitsandbytes": "==0.45.5"}
    both = [upgrade for upgrade in upgrades(pins, findings(pins)) if len(upgrade.releases) == 2]
    assert [upgrade.releases for upgrade in both] == [{"diffusers": "0.37.0", "bitsandbytes": "0.48.1"}]
    one = upgrades({**pins, "diffusers": "==0.42.1"}, findings({**pins, "diffusers": "==0.42.1"}))
    assert (
        "diffusers-8bit-model-gate" in next(u for u in one if u.releases == {"bitsandbytes": "0.48.1"}).fixes
    )


def test_releases_that_do_not_fit_together_and_new_ones_are_notes():
    done = check("-", "--json", stdin="diffusers==0.33.1\ntransformers==5.23.0\nbitsandbytes==99.0\n")
    notes = json.loads(done.stdout)["notes"]
    assert any("FLAX_WEIGHTS_NAME" in note for note in notes)
    assert any(note.startswith("bitsandbytes 99.0 is newer than") for note in notes)


OPEN = "diffusers-from-pipe-cast"  # on diffusers alone, and fixed by no release
ABOVE = "diffusers==99.0\n"


def test_in_a_release_that_is_not_known_a_bug_may_be_there_and_is_patched_if_the_code_is_the_same():
    """It was left out: `check` knew of no bug in the newest diffusers on the day after a release."""
    newest = RELEASES["diffusers"][1]
    bare = check("-", "--json", stdin=ABOVE)
    found = {finding["id"]: finding for finding in json.loads(bare.stdout)["findings"]}
    assert bare.returncode == 1
    assert found[OPEN]["verdict"] == MAYBE
    assert (
        found[OPEN]["why"]
        == f"diffusers 99.0, newer than {newest}, the newest release with the bug that is known"
    )
    assert (found[OPEN]["patched"], found[OPEN]["if_same_code"], found[OPEN]["fails"]) == (False, False, True)

    ours = check("-", "--json", stdin=f"{ABOVE}diffusers-quantfix==0.1.0\n")
    found = {finding["id"]: finding for finding in json.loads(ours.stdout)["findings"]}
    assert ours.returncode == 0
    assert (found[OPEN]["patched"], found[OPEN]["if_same_code"], found[OPEN]["fails"]) == (False, True, False)
    strict = check("-", "--fail-on", "any", stdin=f"{ABOVE}diffusers-quantfix==0.1.0\n")
    assert strict.returncode == 1

    text = check("-", "--explain", stdin=f"{ABOVE}diffusers-quantfix==0.1.0\n").stdout
    assert f"\nif same code    {OPEN}: " in text
    assert "here, if the code is the same as in the newest release with the bug" in " ".join(text.split())
    count = len({one["fix"] for one in found.values()})
    assert text.rstrip().endswith(f"{count} patched if the code is the same, 0 not patched")
    github = check("-", "--format", "github", stdin=f"{ABOVE}diffusers-quantfix==0.1.0\n").stdout
    assert f"::notice title=may be affected%3A {OPEN}::" in github


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"diffusers": "==99.0"}, True),
        ({"diffusers": ">=99.0"}, True),
        ({"diffusers": "==99.0 || ==99.1"}, True),
        ({"diffusers": "==0.43.0.dev0"}, True),
        ({"diffusers": f"=={RELEASES['diffusers'][1]}"}, False),
        ({"diffusers": "==0.30.0"}, None),
        ({"diffusers": f">={RELEASES['diffusers'][1]}"}, False),
    ],
)
def test_only_above_an_open_claim(pins, said):
    found = {one.id: one for one in findings({**pins, "diffusers-quantfix": "==0.1.0"})}
    assert (found[OPEN].if_same_code if OPEN in found else None) is said
    assert CODE not in found


def test_above_a_claim_that_is_closed_a_bug_is_fixed():
    assert CODE not in {one.id for one in findings({"bitsandbytes": "==99.0"})}


def test_the_table_says_what_the_declarations_say():
    for row in table():
        owner = next(iter(row["claims"]))
        assert row["symptom"] and row["title"] and row["patched_since"]
        pins = dict.fromkeys(row["claims"], "")
        assert row["id"] in {finding.id for finding in findings(pins)}
        if row["fixed_in"]:
            # The release that fixes is the first one above the claim; several only fix together, inside it.
            releases = [release.split() for release in row["fixed_in"].split(" with ")]
            for name, version in releases:
                bound = [
                    part[1:]
                    for part in row["claims"].get(name, "").split(",")
                    if part[:1] == "<" != part[1:2]
                ]
                if len(releases) == 1:
                    assert [Version(part) for part in bound] == [Version(version)], row["id"]
        else:
            claim = row["claims"][owner]
            end = claim.rpartition("<")[2]  # where it ends for this target, another one of the fix begins
            others = [other["claims"].get(owner, "") for other in table() if other["fix"] == row["fix"]]
            assert claim == "" or "<=" in claim or any(f">={end}" in other for other in others), row["id"]


def test_this_environment():
    done = check("--env", "--json")
    assert done.returncode == 0, "what runs is installed here, and patches all that it lists"
    found = json.loads(done.stdout)
    assert "packaging" in found["pins"]
    assert all(finding["verdict"] == AFFECTED and finding["patched"] for finding in found["findings"])


def test_a_library_whose_version_cannot_be_read_is_named(tmp_path):
    """It was left out without a word, with all its defects."""
    (tmp_path / "bitsandbytes-0.45.2.dist-info" / "METADATA").mkdir(parents=True)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "diffusers_quantfix", "check", "--env", "--json"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["pins"]["bitsandbytes"] == ""
    assert "installed: the version of bitsandbytes cannot be read; reinstall it" in found["notes"]
    assert "bnb-int8-reload" in {finding["id"] for finding in found["findings"]}


def test_a_reader_who_has_enough_is_no_fault():
    command = f"printf 'bitsandbytes==0.45.2\\n' | {sys.executable} -m diffusers_quantfix check - | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_nothing_of_the_stack_is_imported(tmp_path):
    (tmp_path / "r.txt").write_text("bitsandbytes\ndiffusers\ntransformers\naccelerate\n")
    code = (
        "import sys; from diffusers_quantfix.__main__ import main; main(['check', sys.argv[1]]);"
        "print([m for m in ('torch', 'diffusers', 'transformers', 'accelerate', 'bitsandbytes') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r.txt")], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
