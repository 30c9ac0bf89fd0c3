"""How two runs of somebody else's tests are compared."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile

import pytest

from tests.peers.compare import Intended, Run, compare, intended
from tests.peers.sources import LIBRARIES, _unpack
from tests.upstream.environments import CannotInstall


def test_what_differs_is_named_and_what_fails_on_both_sides_is_counted() -> None:
    without = Run({"a": ("passed", "", ""), "b": ("failed", "OSError", "x"), "c": ("passed", "", "")})
    ours = Run(
        {"a": ("failed", "TypeError", "why"), "b": ("failed", "OSError", "y"), "d": ("passed", "", "")}
    )
    found = compare(without, ours, [])
    assert found.same == {"failed": 1}
    assert found.different == {
        "a": "without: passed; with: failed (TypeError: why)",
        "c": "without: passed; with: not run",
        "d": "without: not run; with: passed",
    }


def test_another_error_is_a_difference() -> None:
    found = compare(Run({"a": ("failed", "OSError", "")}), Run({"a": ("failed", "TypeError", "")}), [])
    assert list(found.different) == ["a"]


def test_an_intended_difference_holds_for_its_outcomes_only() -> None:
    meant = [Intended("^a", "failed", "passed", "the defect that we patch")]
    assert compare(Run({"a": ("failed", "E", "")}), Run({"a": ("passed", "", "")}), meant).meant == {
        "a": "the defect that we patch"
    }
    assert compare(Run({"a": ("passed", "", "")}), Run({"a": ("failed", "E", "")}), meant).different


def test_every_intended_difference_has_a_reason(tmp_path) -> None:
    intended()
    (tmp_path / "list.toml").write_text('[[difference]]\ntests = "a"\nwithout = "failed"\nwith = "passed"\n')
    with pytest.raises(ValueError, match="the difference of a has no reason"):
        intended(tmp_path / "list.toml")


def test_a_process_that_dies_names_its_test(tmp_path) -> None:
    report = tmp_path / "report.jsonl"
    lines = [{"start": "a"}, {"test": "a", "outcome": "passed", "error": ""}, {"start": "b"}]
    report.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Run()
    run.read(report)
    assert (run.died, run.whole, run.tests["b"][0]) == (["b"], False, "died")


def test_the_plugin_runs_and_reports_the_selected_tests(tmp_path) -> None:
    folder = tmp_path / "lib_1_0"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "testing.py").write_text("VALUE = 1\n")
    (folder / "test_one.py").write_text(
        "from tests.testing import VALUE\nfrom .testing import VALUE as same\n"
        "def test_good(): assert VALUE == same\n"
        "def test_bad(): raise KeyError('x')\n"
        "def test_left(): pass\n"
        "def test_never(): pass\n"
    )
    report = tmp_path / "report.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", str(folder / "test_one.py"), "-p", "tests.peers.plugin",
               "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path), "--peers-report", str(report),
               "--peers-select", '{"test_one.py": "good|bad|never"}', "--peers-never", "never"]  # fmt: skip
    subprocess.run(command, capture_output=True, check=False)
    run = Run()
    run.read(report)
    assert run.whole and not run.board
    assert run.tests == {
        "test_one.py::test_good": ("passed", "", ""),
        "test_one.py::test_bad": ("failed", "KeyError", "'x'"),
    }


def _archive(path, names):
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            data = b"def test_a(): pass\n"
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_the_tests_are_taken_from_the_source_distribution(tmp_path) -> None:
    archive = _archive(
        tmp_path / "lib-1.0.tar.gz",
        ["lib-1.0/tests/test_a.py", "lib-1.0/src/x.py", "lib-1.0/tests/../../out.py"],
    )
    _unpack(archive, tmp_path / "home")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["__init__.py", "test_a.py"]


def test_a_source_distribution_without_tests_is_told(tmp_path) -> None:
    with pytest.raises(CannotInstall, match="has no tests"):
        _unpack(_archive(tmp_path / "lib-1.0.tar.gz", ["lib-1.0/src/x.py"]), tmp_path / "home")


def test_what_runs_in_ci_is_a_part_of_what_runs_on_request() -> None:
    for library in LIBRARIES.values():
        assert set(library.quick) <= set(library.files) and set(library.rig_only) <= set(library.files)
