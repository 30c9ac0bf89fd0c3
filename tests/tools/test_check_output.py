"""How `check` answers: what there is nothing to say of, worst first, for machines, and what a user may choose."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest
from packaging.version import Version

import diffusers_quantfix
from diffusers_quantfix.__main__ import main
from diffusers_quantfix.advisories.findings import table
from diffusers_quantfix.advisories.harm import MEANING
from diffusers_quantfix.commands import check as command
from diffusers_quantfix.fixes.targets import declarations

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE = "bnb-quant-state-code"


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    """Calls the command on files: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(text: str, *arguments: str, name: str = "requirements.txt") -> tuple[int, str, str]:
        (tmp_path / name).write_text(text)
        capsys.readouterr()
        code = main(["check", name, *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# bitsandbytes==0.45.2\n", "--index-url https://files.example\n"]
)
@pytest.mark.parametrize("kind", ["text", "json", "sarif"])
def test_nothing_to_check_is_no_success(check, text, kind):
    code, out, err = check(text, "--format", kind)
    assert (code, out) == (2, "")
    assert err == "diffusers-quantfix: requirements.txt contains no requirement: there is nothing to check\n"


def test_nor_is_the_null_device(capsys):
    assert main(["check", "/dev/null"]) == 2
    assert "/dev/null is not a regular file" in capsys.readouterr().err
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", "check", "-"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "diffusers-quantfix: standard input contains no requirement: there is nothing to check\n"
    )


def test_an_empty_project_or_lock_file(check):
    assert check('[project]\nname = "x"\n', name="pyproject.toml")[0] == 2
    assert check("package = []\n", name="uv.lock")[0] == 2


def test_files_without_the_libraries_say_so_first(check):
    code, out, _ = check("numpy==2.0\ntorch==2.6.0\n")
    assert code == 0
    assert out.startswith("none of the libraries is required here: accelerate, bitsandbytes, diffusers,\n")
    code, out, err = check("numpy==2.0\n", "--require-libraries")
    assert (code, out) == (2, "")
    assert "requirements.txt requires none of the libraries: accelerate, bitsandbytes," in err
    assert check("bitsandbytes==0.42.0\n", "--require-libraries")[0] == 0
    assert check("bitsandbytes==0.42.0\n")[1] == "no known bug in these versions\n"


def test_the_worst_comes_first(check):
    code, out, _ = check("bitsandbytes==0.44.1\ndiffusers==0.33.1\n")
    assert code == 1
    heads = [line for line in out.splitlines() if line in MEANING.values()]
    assert heads == list(MEANING.values())
    lines = out.partition("\nupgrades\n")[0].splitlines()
    listed = [line for line in lines if line.startswith(("affected  ", "may be affected  "))]
    assert len(listed) == len({line.split(":")[0] for line in listed}) >= 10, "one line each"
    assert out.splitlines()[1].startswith("affected        bnb-cpu-half-blockwise: Block-wise ")
    assert re.search(
        r"\n\d+ known bugs, \d+ not patched: add diffusers-quantfix \(details: --explain\)\n$", out
    )
    for line in out.partition("\nupgrades\n")[2].splitlines():
        assert len(line) <= 80


def test_details_on_demand(check):
    _, short, _ = check("bitsandbytes==0.45.2\n")
    assert "symptom: " not in short and "issues/1527" not in short
    _, long, _ = check("bitsandbytes==0.45.2\n", "--explain")
    assert '                symptom: RuntimeError "Input tensors need to be on the same GPU,\n' in long
    assert "                not patched: add diffusers-quantfix; fixed in bitsandbytes\n" in long
    assert "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1527" in long


def test_what_is_ignored(check):
    text = "bitsandbytes==0.47.0\n"
    found = [one["id"] for one in json.loads(check(text, "--json")[1])["findings"]]
    ignore = [word for one in found for word in ("--ignore", one)]
    code, out, _ = check(text, *ignore[:-2])
    assert code == 1 and f"{found[-1]}: " in out and "1 known bug, 1 not patched" in out
    code, out, _ = check(text, *ignore, "--json")
    said = json.loads(out)
    assert (code, said["ok"], said["findings"], said["upgrades"]) == (0, True, [], [])
    assert said["ignored"] == sorted(found)
    code, out, err = check(text, "--ignore", "bnb-quant-state-cod")
    assert (code, out) == (2, "")
    assert "no fix is called 'bnb-quant-state-cod'; did you mean bnb-quant-state-code" in err


def test_what_fails(check):
    text = "bitsandbytes==0.45.2\ndiffusers-quantfix==0.1.0\n"
    assert check(text)[0] == check(text, "--fail-on", "unpatched")[0] == 0
    code, out, _ = check(text, "--fail-on", "any", "--quiet")
    assert code == 1 and f"patched         {CODE}: " in out
    assert check("bitsandbytes==0.42.0\n", "--fail-on", "any")[0] == 0


def test_quiet(check):
    assert check("bitsandbytes==0.45.2\ndiffusers-quantfix==0.1.0\n", "--quiet") == (0, "", "")
    assert check("numpy\n", "--quiet")[:2] == (0, "")
    code, out, _ = check("bitsandbytes==0.45.2\n", "--quiet")
    assert code == 1
    assert all(line.startswith("affected  ") for line in out.splitlines())


def test_annotations_of_github(check):
    text = "-r more,%.txt\nbitsandbytes==0.45.2\n"
    pathlib.Path("more,%.txt").write_text("numpy\ndiffusers>=0.33\n")
    code, out, _ = check(text, "--format", "github")
    lines = out.splitlines()
    assert code == 1
    assert (
        f"::error file=requirements.txt,line=2,title=affected%3A {CODE}::QuantState.to leaves the code tensor on the "
        "old device (bitsandbytes 0.45.2); not patched: add diffusers-quantfix; fixed in bitsandbytes 0.45.3"
    ) in lines
    assert any(
        line.startswith("::warning file=more%2C%25.txt,line=2,title=may be affected%3A ") for line in lines
    )
    assert all(re.match(r"::(error|warning|notice)( [a-z]+=[^:]*)?::.", line) for line in lines)
    code, out, _ = check("bitsandbytes==0.45.2\ndiffusers-quantfix\n", "--format", "github")
    assert code == 0 and not re.search(r"(?m)^::(error|warning)", out)
    code, out, _ = check("bitsandbytes=0.45.2\n", "--format", "github")
    assert (code, out) == (
        2,
        "::error::requirements.txt, line 1 is not a requirement (it begins with bitsandbytes)\n",
    )


def assert_is_sarif(log: dict[str, object]) -> None:
    """The properties that SARIF 2.1.0 requires, and the links between them."""
    assert log["version"] == "2.1.0"
    assert set(log) <= {"$schema", "version", "runs"}
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "diffusers-quantfix" and driver["version"] == diffusers_quantfix.__version__
    assert len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"])
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"] and rule["fullDescription"]["text"] and rule["help"]["text"]
    for result in run["results"]:
        assert result["message"]["text"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        (location,) = result["locations"]  # code scanning refuses a log in which one result has none
        physical = location["physicalLocation"]
        assert re.fullmatch(r"[\w./%~-]+", physical["artifactLocation"]["uri"])
        assert physical["region"]["startLine"] >= 1
    for invocation in run["invocations"]:
        assert invocation["executionSuccessful"] is True
        for notification in invocation["toolExecutionNotifications"]:
            assert notification["message"]["text"] and notification["level"] == "note"


def test_sarif(check):
    pathlib.Path("sub dir").mkdir()
    code, out, _ = check("bitsandbytes==0.45.2\ndiffusers\n", "--format", "sarif", name="sub dir/r.txt")
    log = json.loads(out)
    assert_is_sarif(log)
    results = {result["ruleId"]: result for result in log["runs"][0]["results"]}
    assert code == 1
    assert results[CODE]["level"] == "error"
    assert results["diffusers-quantized-cast"]["level"] == "warning"
    assert results[CODE]["locations"] == [
        {"physicalLocation": {"artifactLocation": {"uri": "sub%20dir/r.txt"}, "region": {"startLine": 1}}}
    ]
    patched = json.loads(check("bitsandbytes==0.45.2\ndiffusers-quantfix\n", "--format", "sarif")[1])
    assert {result["level"] for result in patched["runs"][0]["results"]} == {"note"}
    none = json.loads(check("bitsandbytes==0.42.0\n", "--format", "sarif")[1])
    assert_is_sarif(none)
    assert none["runs"][0]["results"] == []


def test_sarif_of_pins_that_are_in_no_file():
    command = [sys.executable, "-m", "diffusers_quantfix", "check", "-", "--format", "sarif"]
    done = subprocess.run(
        command, input="bitsandbytes==0.45.2\n", capture_output=True, text=True, check=False
    )
    log = json.loads(done.stdout)
    assert_is_sarif(log)
    (place,) = {json.dumps(result["locations"]) for result in log["runs"][0]["results"]}
    assert "not-in-a-file" in place


def test_where_a_library_is_named(check):
    lock = 'version = 1\n[[package]]\nname = "numpy"\nversion = "1"\n'
    lock += '[[package]]\nname = "bitsandbytes"\nversion = "0.45.2"\n'
    said = json.loads(check(lock, "--json", name="uv.lock")[1])["findings"]
    assert {(one["file"], one["line"]) for one in said} == {("uv.lock", 5)}
    project = '[project]\ndependencies = [\n "numpy",\n "bitsandbytes==0.45.2",\n]\n'
    said = json.loads(check(project, "--json", name="pyproject.toml")[1])["findings"]
    assert {(one["file"], one["line"]) for one in said} == {("pyproject.toml", 4)}


def test_the_pins_of_other_packages_are_not_printed(check):
    said = json.loads(check("bitsandbytes==0.45.2\nghp_0123456789abcdef\n", "--json")[1])
    assert said["pins"] == {"bitsandbytes": "==0.45.2"}
    assert said["requirements"] == 2


def test_a_file_outside_is_read_when_that_is_asked_for(check, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "limits.txt").write_text("bitsandbytes==0.45.2\n")
    code, out, err = check("-c ../limits.txt\nbitsandbytes\n", name="sub/r.txt")
    assert (code, out) == (2, "")
    assert (
        err == "diffusers-quantfix: sub/r.txt, line 1 points outside the project; --follow-outside reads it\n"
    )
    assert check("-c ../limits.txt\nbitsandbytes\n", "--follow-outside", name="sub/r.txt")[0] == 1


def test_a_fault_of_ours_is_not_taken_for_a_defect(check, monkeypatch):
    def fail(*_: object) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(command, "read", fail)
    assert check("bitsandbytes\n") == (
        2,
        "",
        "diffusers-quantfix: requirements.txt cannot be read: RecursionError\n",
    )


def test_a_name_that_the_output_cannot_encode(tmp_path):
    file = tmp_path / "ü.txt"
    file.write_text("bitsandbytes==0.45.2 ; python_version < '3'\n")
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", "check", str(file)],
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "\\xfc.txt, line 1: bitsandbytes was left out" in " ".join(done.stdout.split())


def test_every_fix_says_since_when_it_is_here():
    """The section of the changelog in which a fix stands first is the version that first had it."""
    sections = re.split(r"(?m)^## (\S+).*$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[1:]
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    versions = sorted(texts, key=Version)
    for row in table():
        first = next((one for one in versions if f"`{row['id']}`" in texts[one]), None)
        assert row["patched_since"] == first, row["id"]
        assert Version(first) <= Version(diffusers_quantfix.__version__)


def test_a_release_of_ours_from_before_a_fix_does_not_patch_it(check, monkeypatch):
    (fix,) = (fix for fix in declarations() if fix.id == CODE)
    monkeypatch.setattr(fix, "since", "0.2.0")
    said = json.loads(check("bitsandbytes==0.45.2\ndiffusers-quantfix==0.1.0\n", "--json")[1])
    patched = {one["id"]: one["patched"] for one in said["findings"]}
    assert not patched.pop(CODE) and all(patched.values())
