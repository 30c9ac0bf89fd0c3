"""The driver: resume, keys of environments, failed installs, what is inspected in a fix, the tables."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import types
from pathlib import Path

import pytest

from diffusers_quantfix.engine.errors import TargetMissing
from diffusers_quantfix.engine.fix import Fix, Target
from tests.upstream import __main__ as driver
from tests.upstream import environments, newest, run_cell
from tests.upstream.cells import Cell, read
from tests.upstream.forecast import forecast
from tests.upstream.inspect_fixes import inspect_fix
from tests.upstream.report import WIDTH, Progress, summary
from tests.upstream.verdict import Run

CELL = Cell("D04", "3.11", {"bitsandbytes": "0.45.2", "wrapt": "2.5.2"})


def result(cell=CELL.name, failures=(), state="patched", **more):
    return {
        "cell": cell, "pins": CELL.pins, "failures": list(failures), "seconds": {"all": 12.0}, "skips": [],
        "counts": {"passed": 3, "failed": len(failures), "skipped": 0}, "logs": "logs",
        "fixes": {"a-fix": {"state": state, "why": "said so"}}, "date": "2026-11-21", **more,
    }  # fmt: skip


# ---------------------------------------------------------------- resume


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """Runs of cells, replaced by a note in a list."""
    calls = []

    def fake(cell, folder, phase, quick, fixes):
        calls.append(cell.name)
        made = result(cell.name, key=run_cell.result_key(cell, quick, fixes))
        return run_cell._keep(run_cell.result_file(folder, cell, fixes), made)

    monkeypatch.setattr(driver, "run_cell", fake)
    return calls


def test_a_good_result_of_equal_pins_and_sources_is_taken_over(counted, tmp_path, capsys):
    for _ in range(2):
        driver.run([CELL], tmp_path, jobs=1, fresh=False)
    assert counted == ["D04"]
    driver.run([CELL], tmp_path, jobs=1, fresh=True)
    assert counted == ["D04"] * 2
    assert "reused" in capsys.readouterr().err


def test_space_and_time_are_said_first(counted, tmp_path):
    others = [
        Cell(name, python, {"torch": torch})
        for name, python, torch in (("A", "3.11", "2.5.1"), ("B", "3.11", "2.5.1"), ("C", "3.12", "2.5.1"))
    ]
    said = forecast(others, tmp_path, jobs=2)
    assert said.startswith(f"3 of 3 sets run: at most {7 + 2.3 + 3 * 0.3:.0f} GB of disk (")
    assert "and about 9 min with 2 at a time" in said
    ready = tmp_path / "environments" / others[0].key
    ready.mkdir(parents=True)
    (ready / "complete").touch()
    assert f"at most {2.3 + 0.3:.0f} GB" in forecast(others, tmp_path, jobs=1), "A and B are the same"
    driver.run(others[:1], tmp_path, jobs=1, fresh=False)
    assert "2 of 3 sets run; 1 were done before: " in forecast(others, tmp_path, jobs=1)
    assert forecast(others[:1], tmp_path, jobs=1) == "1 sets, all of them done before"
    assert "1 of 1 sets run" in forecast(others[:1], tmp_path, jobs=1, fresh=True)


def test_other_pins_other_sources_and_failures_are_run_again(counted, tmp_path, monkeypatch):
    driver.run([CELL], tmp_path, jobs=1, fresh=False)
    newer = Cell("D04", "3.11", {**CELL.pins, "wrapt": "1.17.0"})
    driver.run([newer], tmp_path, jobs=1, fresh=False)
    assert len(counted) == 2
    monkeypatch.setattr(run_cell, "sources_key", lambda root=None: "changed")
    driver.run([newer], tmp_path, jobs=1, fresh=False)
    assert len(counted) == 3
    path = run_cell.result_file(tmp_path, newer)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failures": ["one"]}))
    driver.run([newer], tmp_path, jobs=1, fresh=False)
    assert len(counted) == 4
    path.write_text('{"half')
    assert run_cell.previous(tmp_path, newer) is None


def test_a_quick_result_does_not_serve_a_full_run_but_the_other_way_round_it_does(counted, tmp_path):
    driver.run([CELL], tmp_path, jobs=1, fresh=False, quick=True)
    driver.run([CELL], tmp_path, jobs=1, fresh=False, quick=True)
    assert len(counted) == 1
    driver.run([CELL], tmp_path, jobs=1, fresh=False)
    assert len(counted) == 2
    driver.run([CELL], tmp_path, jobs=1, fresh=False, quick=True)
    assert len(counted) == 2


def test_a_run_of_some_fixes_stands_beside_the_full_one(counted, tmp_path):
    driver.run([CELL], tmp_path, jobs=1, fresh=False)
    for fixes in (("b",), ("a", "b"), ("b", "a")):
        driver.run([CELL], tmp_path, jobs=1, fresh=False, fixes=fixes)
    assert len(counted) == 3, "the order of the names is nothing new"
    driver.run([CELL], tmp_path, jobs=1, fresh=False)
    assert len(counted) == 3


def test_what_was_seen_is_written_when_asked(counted, monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr(environments, "find_uv", lambda: ["uv"])
    monkeypatch.setattr(driver, "find_uv", lambda: ["uv"])
    monkeypatch.setattr(driver.results, "load", dict)
    monkeypatch.setattr(driver.results, "save", lambda found: written.append(found))
    monkeypatch.setattr(driver.tables, "write", lambda: written.append("pages"))
    monkeypatch.setattr(
        driver, "run_cell",
        lambda cell, folder, phase, quick, fixes: result(cell.name, pins=cell.pins)
        | {"fixes": {fixes[0]: {"state": "patched", "why": ""}}},
    )  # fmt: skip
    asked = ["--cells", "D04", "--fixes", "bnb-quant-state-code", "--folder", str(tmp_path)]
    assert driver.main(asked) == 0 and not written
    assert driver.main([*asked, "--write", "--fresh"]) == 0
    found, pages = written
    assert found["bnb-quant-state-code"]["D04"].state == "patched" and pages == "pages"
    assert sum(map(len, found.values())) == 1
    assert driver.main(["--cells", "D04", "--fixes", "no-such-fix", "--folder", str(tmp_path)]) == 2


def test_environments_alone(counted, monkeypatch, tmp_path, capsys):
    def prepare(cell, folder, log):
        if cell.name == "D05":
            raise environments.CannotInstall("no release is called so")
        assert log.parent.is_dir()

    monkeypatch.setattr(driver, "find_uv", lambda: ["uv"])
    monkeypatch.setattr(driver, "prepare", prepare)
    asked = ["--install", "--folder", str(tmp_path), "--cells"]
    assert driver.main([*asked, "D03", "D04"]) == 0 and not counted
    assert driver.main([*asked, "D04", "D05"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "2 of 2 environments are ready",
        "D05: no release is called so",
        "1 of 2 environments are ready",
    ]


def test_a_fault_of_the_driver_is_a_failure_of_its_cell_and_the_others_go_on(counted, monkeypatch, tmp_path):
    made = driver.run_cell

    def run(cell, folder, phase, quick, fixes):
        return made(cell, folder, phase, quick, fixes) if cell.name == "D04" else 1 / 0

    monkeypatch.setattr(driver, "run_cell", run)
    bad, good = driver.run([Cell("D03", "3.11", {}), CELL], tmp_path, jobs=1, fresh=False)
    assert bad["failures"] == ["the driver failed: ZeroDivisionError: division by zero"]
    assert not good["failures"]
    assert "1 of 2 cells good" in summary([bad, good])


def test_results_depend_on_fixes_and_their_tests_but_not_on_documentation(tmp_path):
    for name in ("diffusers_quantfix/fixes/a.py", "tests/fixes/test_a.py", "diffusers_quantfix/verify/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    for name in run_cell._SOURCES:
        if name.endswith(".py"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("1")
    before = run_cell.sources_key(tmp_path)
    for page in ("COMPATIBILITY", "FIXES", "PIPELINES"):
        (tmp_path / f"diffusers_quantfix/{page}.md").write_text("2")
    assert run_cell.sources_key(tmp_path) == before
    for name in (
        "tests/fixes/test_a.py",
        "diffusers_quantfix/verify/a.py",
    ):  # the cases are run by a test of the fixes
        (tmp_path / name).write_text("2")
        assert run_cell.sources_key(tmp_path) != before
        (tmp_path / name).write_text("1")


def test_the_exit_status(counted, monkeypatch, tmp_path, capsys):
    place = ["--folder", str(tmp_path), "--jobs", "1"]
    monkeypatch.setattr(environments, "find_uv", lambda: ["uv"])
    monkeypatch.setattr(driver, "find_uv", lambda: ["uv"])
    assert driver.main(["--cells", "D04", *place]) == 0
    assert driver.main(["--cells", "D99", *place]) == 2
    monkeypatch.setattr(
        driver, "run_cell", lambda cell, folder, phase, quick, fixes: result(cell.name, ["one"])
    )
    assert driver.main(["--cells", "D05", *place]) == 1
    # With every cell there, the sides of each claim are looked at too.
    monkeypatch.setattr(driver, "run_cell", lambda cell, folder, phase, quick, fixes: result(cell.name))
    monkeypatch.setattr(driver, "declarations", lambda: {"a-fix": {"claims": {"bitsandbytes": "<=0.50.2"}}})
    assert driver.main(["--cells", "all", "--fresh", *place]) == 0
    monkeypatch.setattr(
        driver, "run_cell", lambda cell, folder, phase, quick, fixes: result(cell.name, state="healthy")
    )
    assert driver.main(["--cells", "all", "--fresh", *place]) == 1
    assert "a-fix: its claim on bitsandbytes is too wide" in capsys.readouterr().out


def test_a_range_runs_the_tests_of_its_fixes_only(tmp_path):
    (tmp_path / "tests/fixes").mkdir(parents=True)
    for name in ("test_bnb_a.py", "test_bnb_a_more.py", "test_diffusers_b.py", "helpers.py"):
        (tmp_path / "tests/fixes" / name).touch()
    everything = [
        "tests/fixes/test_bnb_a.py",
        "tests/fixes/test_bnb_a_more.py",
        "tests/fixes/test_diffusers_b.py",
    ]
    assert run_cell.test_paths(["bnb-a"], "bitsandbytes", tmp_path) == everything[:2]
    assert run_cell.test_paths(["bnb-a"], "", tmp_path) == everything
    (tmp_path / "tests/fixes/test_diffusers_b.py").write_text('@pytest.mark.defect("bnb-a", shows="x")')
    assert run_cell.test_paths(["bnb-a"], "", tmp_path, fixes=("bnb-a",)) == everything[2:]


# ---------------------------------------------------------------- environments


@pytest.fixture
def fake_uv(monkeypatch, tmp_path):
    """A uv that makes the folder of an environment, counts its calls, and refuses bitsandbytes 9."""
    log = tmp_path / "calls"
    uv = tmp_path / "uv"
    uv.write_text(f"""#!{sys.executable}
import os, sys
open({str(log)!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
if "venv" in sys.argv: os.makedirs(sys.argv[-1] + "/bin")
if "--target" in sys.argv: os.makedirs(sys.argv[sys.argv.index("--target") + 1])
if any("bitsandbytes==9" in word for word in sys.argv):
    sys.exit("error: No solution found\\n  cause: Because there is no version of bitsandbytes==9 and you require it.")
""")
    uv.chmod(uv.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(environments, "find_uv", lambda: [str(uv)])
    monkeypatch.setenv("PIP_FIND_LINKS", "some-folder")
    return log


def test_an_environment_is_built_once(fake_uv, tmp_path):
    for _ in range(2):
        python = environments.prepare(CELL, tmp_path / "cache", tmp_path / "log").python
    calls = fake_uv.read_text().splitlines()
    assert len(calls) == 2 and calls[0].startswith("venv") and "bitsandbytes==0.45.2" in calls[1]
    assert "--find-links some-folder" in calls[1]
    assert CELL.key in str(python)


def test_an_environment_that_was_interrupted_is_built_again(fake_uv, tmp_path):
    environments.prepare(CELL, tmp_path / "cache", tmp_path / "log")
    (tmp_path / "cache/environments" / CELL.key / "complete").unlink()
    environments.prepare(CELL, tmp_path / "cache", tmp_path / "log")
    assert len(fake_uv.read_text().splitlines()) == 4


def test_a_range_shares_one_environment(fake_uv, tmp_path):
    for release in ("0.45.2", "0.45.3"):
        alone = Cell("b", "3.11", {"wrapt": "2.5.2", "bitsandbytes": release}, alone="bitsandbytes")
        found = environments.prepare(alone, tmp_path / "cache", tmp_path / "log")
        assert found.variables["PYTHONPATH"].endswith(alone.key)
    calls = fake_uv.read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["venv", "pip", "pip", "pip"]
    assert "--no-deps --target" in calls[2]


def test_a_set_that_cannot_be_installed_names_the_requirement(fake_uv, tmp_path):
    cell = Cell("D99", "3.11", {"wrapt": "2.5.2", "bitsandbytes": "9"})
    made = run_cell.run_cell(cell, tmp_path / "cache", lambda name: None)
    assert made["failures"] == [
        "cannot install bitsandbytes==9: Because there is no version of bitsandbytes==9 and you require it."
    ]
    assert "no version" in (tmp_path / "cache/logs/D99/install.log").read_text()


def test_blame_names_every_requirement_that_uv_names():
    text = """error: No solution found when resolving dependencies
      cause: Because diffusers>=0.42.1 depends on huggingface-hub>=1.32.0 and you require diffusers==0.42.1, we
             can conclude that you require huggingface-hub>=1.32.0. And because you require huggingface-hub==0.36.2,
             we can conclude that your requirements are unsatisfiable."""
    said = environments.blame(text, ["diffusers==0.42.1", "huggingface-hub==0.36.2", "diffusers==0.42"])
    assert said.startswith(
        "cannot install diffusers==0.42.1 with huggingface-hub==0.36.2: Because diffusers>=0.42.1"
    )


# ---------------------------------------------------------------- inspection of a fix


@pytest.fixture
def target(monkeypatch):
    """A library with one function, installed as far as versions are concerned."""
    module = types.ModuleType("fakelib")
    exec("def move(state, device, non_blocking=False): return 'stale'", module.__dict__)
    monkeypatch.setitem(sys.modules, "fakelib", module)
    return module


HERE = Target("a-fix", "fakelib", {"pytest": ""})


def fake_fix(new, probe=None):
    fix = types.SimpleNamespace(FIX=Fix("", id="a-fix", targets=(HERE,)))
    fix.broken = probe or (lambda module: module.move(None, None) == "stale")
    fix.patch = lambda module, ledger: ledger.replace(module, "move", new)
    return fix


def test_a_fix_that_meets_what_it_expects_leaves_everything_as_it_was(target):
    before = target.move
    said = inspect_fix(fake_fix(lambda state, device, non_blocking=False: "moved"), HERE)
    assert (said["claim"], said["probe"], said["patch"], said["slots"]) == (
        "fits",
        "broken",
        "ok",
        ["fakelib.move"],
    )
    assert target.move is before


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (lambda state, device: "moved", "it takes no argument non_blocking"),
        (lambda state, where, non_blocking=False: "moved", "argument 2 is where, not device"),
        (lambda state, device, non_blocking=False, *, copy: "moved", "it insists on copy"),
        (lambda state, device, non_blocking=False: "stale", "the probe still says broken after the patch"),
        (lambda *args, **kwargs: "moved", ""),
        (lambda first, device, non_blocking=False, copy=False: "moved", ""),
    ],
)
def test_what_is_written_must_take_every_call(target, new, says):
    patch = inspect_fix(fake_fix(new), HERE)["patch"]
    assert says in patch if says else patch == "ok"


def test_a_decorator_of_upstream_does_not_hide_its_signature(target):
    code = "import functools\noriginal = move\n@functools.wraps(original)\ndef move(*args): return original(*args)"
    exec(code, target.__dict__)
    assert inspect_fix(fake_fix(lambda state, device, non_blocking=False: "moved"), HERE)["patch"] == "ok"
    assert "it takes no argument" in inspect_fix(fake_fix(lambda state, device: "moved"), HERE)["patch"]


def test_a_target_that_moved(target):
    fix = fake_fix(None)
    fix.patch = lambda module, ledger: ledger.replace(module, "gone", 1)
    assert "the target moved: fakelib has no gone" in inspect_fix(fix, HERE)["patch"]

    def probe(module):
        raise TargetMissing("fakelib has no move")

    assert inspect_fix(fake_fix(None, probe), HERE)["probe"] == "missing"
    assert (
        inspect_fix(fake_fix(None), Target("a-fix", "fakelib_that_is_not_there", {"pytest": ""}))["probe"]
        == "absent"
    )


def test_outside_of_its_claim_nothing_is_tried_unless_asked(target):
    fix = fake_fix(lambda state, device, non_blocking=False: "moved")
    outside = Target("a-fix", "fakelib", {"pytest": "<1"})
    assert inspect_fix(fix, outside)["patch"] == ""
    said = inspect_fix(fix, outside, try_candidates=True)
    assert (said["claim"], said["patch"]) == ("out-of-range", "ok")


# ---------------------------------------------------------------- the processes of a set


def test_a_process_is_ended_when_it_writes_nothing(tmp_path):
    log = tmp_path / "bare.log"
    log.touch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.utime(log, (0, 0))
        with pytest.raises(subprocess.TimeoutExpired):
            run_cell._wait(process, [log, tmp_path / "absent.jsonl"])
        os.utime(log)
        process.communicate(b"\n")
        assert run_cell._wait(process, [log, tmp_path / "absent.jsonl"]) == 0


@pytest.mark.parametrize(
    ("torch", "quick", "runs"), [("2.5.1", False, True), ("2.5.1", True, False), (read().torch, False, False)]
)
def test_a_torch_of_its_own_runs_the_tests_of_the_rig(monkeypatch, tmp_path, torch, quick, runs):
    monkeypatch.setattr(run_cell, "prepare", lambda *of: environments.Environment(Path(sys.executable), {}))
    monkeypatch.setattr(run_cell, "_pytest", lambda *of: Run())
    monkeypatch.setattr(run_cell, "_freeze", lambda environment: {})
    monkeypatch.setattr(run_cell, "_process", lambda command, *of: "exit status 1")
    cell = Cell("T01", "3.11", CELL.pins | {"torch": torch})
    phases = []
    done = run_cell.run_cell(cell, tmp_path, phases.append, quick=quick)
    assert ("rig" in phases) is ("rig: exit status 1" in done["failures"]) is runs


# ---------------------------------------------------------------- what is printed


def test_the_summary_fits_80_columns_and_says_every_failure_and_reason():
    skip = {
        "side": "bare",
        "test": "a::b",
        "reason": "needs a CPU with AVX512-BF16, which this machine does not have " * 2,
    }
    bad = result("bitsandbytes-0.43.0", ["bare: " + "word " * 60], "failed", skips=[skip] * 3)
    text = summary([result(), bad, result("D05", state="applied")])
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "3 x needs a CPU with AVX512-BF16" in text
    assert "2 of 3 cells good; not good: bitsandbytes-0.43.0" in text
    assert text.endswith("9 passed, 1 failed, 0 skipped")


def test_a_fix_that_no_cell_could_reproduce_is_named():
    assert "could reproduce the defect" in summary([result(state="applied")])
    assert "could reproduce the defect" not in summary([result(state="applied"), result("D05")])


def test_progress_on_a_terminal_and_in_a_log():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for out, live in ((Terminal(), True), (io.StringIO(), False)):
        progress = Progress(2, out)
        progress.phase("D04", "bare")
        progress.finished(result(), reused=True)
        progress.close()
        assert ("\r" in out.getvalue()) is live
        assert "[1/2] D04" in out.getvalue()


# ---------------------------------------------------------------- --add


def test_what_is_not_named_is_the_newest():
    cell = newest.wanted(["diffusers=0.42.1", "bitsandbytes=latest"], read())
    assert "diffusers==0.42.1" in cell.requirements
    assert {"bitsandbytes", "transformers", "accelerate", "peft"} <= set(cell.requirements)
    for word in ("diffusers", "diffusers=", "=1"):
        with pytest.raises(ValueError, match="is not NAME=RELEASE"):
            newest.wanted([word], read())


def test_the_row_to_append():
    table = read()
    releases = {
        "diffusers": "9.0",
        "transformers": "6.0",
        "accelerate": "2.0",
        "bitsandbytes": "1.0",
        "peft": "1.0",
    }
    lines = newest.row(releases, table)
    assert 'diffusers = "9.0"' in lines and 'peft = "1.0"' in lines
    assert lines[1] == f'name = "D{sum(cell.name.startswith("D") for cell in table.cells) + 1:02}"'
    text = newest.report(result(installed=releases), table)
    assert "and for its [releases]: diffusers 9.0" in text


def test_nothing_of_this_machine_stands_in_the_driver():
    places = [os.environ.get("PIP_FIND_LINKS", ""), str(Path.home())]
    for file in Path(__file__).parent.glob("*"):
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        assert not any(place and place != "/" and place in text for place in places), file
