"""Runs one cell: environment, both sides, inspection, verdict; one JSON file comes out."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers_quantfix.fixes.targets import TARGETS
from tests.index import declared

from .cells import Cell, digest, read
from .environments import CannotInstall, Environment, prepare
from .verdict import Run, Verdict, judge

ROOT = Path(__file__).parents[2]
# What a result depends on.  Not the documentation, or the driver's own tests.
_SOURCES = ("diffusers_quantfix", "tests/fixes", "tests/rig", "tests/conftest.py", "tests/gate.py", "tests/sides.py",
            "tests/upstream/plugin.py", "tests/upstream/inspect_fixes.py", "tests/upstream/verdict.py")  # fmt: skip
_APART = tuple(f"diffusers_quantfix/{page}.md" for page in ("COMPATIBILITY", "FIXES", "PIPELINES"))
# Seconds without a line in a report: a limit on a whole phase ends it where the machine is shared.  The longest test
# takes 60 s on two idle cores.
SILENCE = 900.0
_running: set[subprocess.Popen[bytes]] = set()
_stopping = threading.Event()


class Interrupted(Exception):
    """The driver is being ended."""


def sources_key(root: Path = ROOT) -> str:
    """A hash of everything in the project that a result depends on."""
    parts = []
    for source in _SOURCES:
        path = root / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(root).as_posix()
            if file.is_file() and "__pycache__" not in name and not name.startswith(_APART):
                parts.append([name, digest(file.read_bytes().decode("utf-8", "replace"))])
    return digest(parts)


def declarations() -> dict[str, dict[str, Any]]:
    """Name of each target -> what its fix declares."""
    return {
        target.name: {"claims": target.claims, "fixed_in": target.fixed_in, "module": target.module, "fix": fix.id,
                      "title": fix.title, "symptom": fix.symptom, "upstream": list(fix.upstream)}
        for fix in declared().values()
        for target in fix.targets
    }  # fmt: skip


def relevant(cell: Cell, fixes: tuple[str, ...] = ()) -> list[str]:
    """The fixes that a cell is asked about: all or the named ones; on a range those that need nothing else."""
    ids = sorted(fixes or TARGETS)
    if not cell.alone:
        return ids
    said = declarations()
    return [fix_id for fix_id in ids if set(said[fix_id]["claims"]) == {cell.alone}]


def test_paths(ids: list[str], alone: str, root: Path = ROOT, fixes: tuple[str, ...] = ()) -> list[str]:
    """The test files to run: all of tests/fixes, for a range those that are named after its fixes.

    With ``fixes`` only those with a mark of one of them.
    """
    files = sorted((root / "tests/fixes").glob("test_*.py"))
    if fixes:
        marks = tuple(f'"{fix_id}"' for fix_id in ids)
        files = [file for file in files if any(mark in file.read_text(encoding="utf-8") for mark in marks)]
    elif alone:
        names = tuple(f"test_{fix_id.replace('-', '_')}" for fix_id in ids)
        files = [file for file in files if file.stem.startswith(names)]
    return [file.relative_to(root).as_posix() for file in files]


def result_file(folder: Path, cell: Cell, fixes: tuple[str, ...] = ()) -> Path:
    some = f"-{digest(sorted(fixes))[:6]}" if fixes else ""
    return folder / "results" / f"{cell.name}{some}.json"


def result_key(cell: Cell, quick: bool, fixes: tuple[str, ...] = ()) -> str:
    """What a result depends on: the pins, the sources, whether only the proofs of defects ran, and of which fixes."""
    return digest([cell.key, sources_key(), "quick" if quick else "all", *sorted(fixes)])


def previous(
    folder: Path, cell: Cell, quick: bool = False, fixes: tuple[str, ...] = ()
) -> dict[str, Any] | None:
    """The result of an earlier run over the same pins and sources; a full one serves a quick run as well."""
    try:
        result = json.loads(result_file(folder, cell, fixes).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    good = {result_key(cell, False, fixes)} | ({result_key(cell, True, fixes)} if quick else set())
    return result if result.get("key") in good else None


def blank(cell: Cell, folder: Path) -> dict[str, Any]:
    """A result in which nothing has run yet."""
    return {
        "cell": cell.name, "pins": cell.pins, "alone": cell.alone, "failures": [], "fixes": {},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "skips": [], "counts": {}, "seconds": {},
        "logs": str(folder / "logs" / cell.name),
    }  # fmt: skip


def run_cell(
    cell: Cell,
    folder: Path,
    phase: Callable[[str], None],
    assess: Callable[..., Verdict] = judge,
    try_candidates: bool = False,
    quick: bool = False,
    fixes: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run one cell and keep its result.

    Args:
        cell: the release set.
        folder: where environments, logs and results are kept.
        phase: called with the name of each phase as it begins.
        assess: the judge, `verdict.judge` for a pinned cell.
        try_candidates: patch also where the probe says broken outside of a claim.
        quick: only the tests that prove a defect.  Those that are marked thorough run on no cell, but with the
            README's test command on the newest set.
        fixes: only the test files of these; empty for all.
    """
    logs = folder / "logs" / cell.name
    logs.mkdir(parents=True, exist_ok=True)
    key = result_key(cell, quick, fixes)
    path = result_file(folder, cell, fixes)
    result = blank(cell, folder)
    began = time.monotonic()
    log = logs / "install.log"
    log.write_text("")
    phase("install")
    try:
        environment = prepare(cell, folder, log)
    except CannotInstall as error:
        return _keep(path, result | {"failures": [str(error)]})
    result["seconds"]["install"] = round(time.monotonic() - began, 1)
    ids = relevant(cell, fixes)
    report = logs / "inspect.json"
    report.unlink(missing_ok=True)
    flags = ["--try-candidates"] if try_candidates else []
    paths = test_paths(ids, cell.alone, fixes=fixes)
    runs: dict[str, Run] = {}
    for side in ("bare", "patched"):
        phase(side)
        more = ["-m", "not thorough and not long and not whole" + (" and defect" if quick else "")]
        more += ["--cell-inspect", str(report), *flags] if side == "bare" else []
        runs[side] = _pytest(cell, environment, side, paths, more, logs, result["seconds"])
        result["seconds"][f"{side} processor"] = runs[side].processor_seconds
    broken_rig = ""
    if _has_a_torch_of_its_own(cell) and not quick and not fixes:
        phase("rig")
        command = [str(environment.python), "-m", "pytest", "-q", "tests/rig", "-p", "no:cacheprovider"]
        broken_rig = _process(command, environment, "rig", logs, result["seconds"], {})
    not_installed = ""
    if not cell.alone and not (quick and fixes):
        phase("start")
        command = [str(environment.python), "-m", "tests.upstream.ordinary"]
        not_installed = _process(command, environment, "start", logs, result["seconds"], {})
    died = ""
    if not report.exists():
        phase("inspect")
        command = [str(environment.python), "-m", "tests.upstream.inspect_fixes", str(report), *flags]
        died = _process(
            command, environment, "inspect", logs, result["seconds"], {"DIFFUSERS_QUANTFIX": "off"}
        )
    found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    verdict = assess(ids, runs["bare"], runs["patched"], found, untested_ok=bool(cell.alone))
    broken = {"rig": broken_rig, "start": not_installed, "inspect": died}
    result.update(
        failures=[f"{name}: {why}" for name, why in broken.items() if why] + verdict.failures,
        fixes=verdict.fixes, skips=verdict.skips, counts=verdict.counts, installed=_freeze(environment),
    )  # fmt: skip
    if result_key(cell, quick, fixes) == key:  # else the sources changed under way: do not resume from it
        result["key"] = key
    result["seconds"]["all"] = round(time.monotonic() - began, 1)
    return _keep(path, result)


def _has_a_torch_of_its_own(cell: Cell) -> bool:
    """Whether the tests of the rig run on it; on the torch of the other sets they run with the README's command."""
    return not cell.alone and cell.pins["torch"] != read().torch


def _keep(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return result


def _pytest(
    cell: Cell,
    environment: Environment,
    side: str,
    paths: list[str],
    more: list[str],
    logs: Path,
    seconds: dict[str, float],
) -> Run:
    report = logs / f"{side}.jsonl"
    report.unlink(missing_ok=True)
    if not paths:
        return Run()
    command = [
        str(environment.python), "-m", "pytest", *paths, "--side", side, "-p", "tests.upstream.plugin",
        "--cell-report", str(report), "--cell-alone", cell.alone, "-p", "no:cacheprovider",
        "--continue-on-collection-errors", *more,
    ]  # fmt: skip
    died = _process(command, environment, side, logs, seconds, {}, report)
    return Run.read(report, "" if died.startswith("exit status") else died)


def _process(
    command: list[str],
    environment: Environment,
    name: str,
    logs: Path,
    seconds: dict[str, float],
    variables: dict[str, str],
    report: Path | None = None,
) -> str:
    """Run one process into its log; why it ended badly, empty when it ended well.

    It is ended when for `SILENCE` nothing was written into its log or its ``report``.
    """
    if _stopping.is_set():
        raise Interrupted(name)
    began = time.monotonic()
    ours = {
        name: value
        for name, value in os.environ.items()
        # Bytecode is kept whatever the machine says: to compile a stack anew takes each process five seconds.
        if not name.startswith(("PYTEST_", "DIFFUSERS_QUANTFIX")) and name != "PYTHONDONTWRITEBYTECODE"
    }
    keep = {name: value for name, value in os.environ.items() if name.startswith("DIFFUSERS_QUANTFIX_")}
    path = os.pathsep.join(filter(None, [environment.variables.get("PYTHONPATH"), str(ROOT)]))
    ours |= keep | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1",
                    "TOKENIZERS_PARALLELISM": "false"} | variables  # fmt: skip
    # A rig that cannot be had would skip most of what is to be proved.
    ours.setdefault("DIFFUSERS_QUANTFIX_REQUIRE_RIG", "1")
    with (logs / f"{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=ours,
            start_new_session=True,
        )  # fmt: skip
        _running.add(process)
        try:
            status = _wait(process, [Path(log.name), *([report] if report else [])])
            died = (
                f"exit status {status}" if status > 0 else f"killed by {_signal(-status)}" if status else ""
            )
        except subprocess.TimeoutExpired:
            died = f"wrote nothing for {SILENCE:.0f} s"
        finally:
            _running.discard(process)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if _stopping.is_set():
        raise Interrupted(name)
    seconds[name] = round(time.monotonic() - began, 1)
    return died


def _wait(process: subprocess.Popen[bytes], written: list[Path]) -> int:
    """Its exit status.

    Raises:
        subprocess.TimeoutExpired: nothing was written into these files for `SILENCE`.
    """
    while True:
        last = max(path.stat().st_mtime for path in written if path.exists())
        try:
            return process.wait(max(0.0, SILENCE - (time.time() - last)))
        except subprocess.TimeoutExpired:
            if max(path.stat().st_mtime for path in written if path.exists()) == last:
                raise


def stop() -> None:
    """End the processes that run now: they are in sessions of their own, so an interrupt does not reach them."""
    _stopping.set()
    for process in list(_running):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _freeze(environment: Environment) -> dict[str, str]:
    """Every distribution that the cell really has."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    done = subprocess.run(
        [str(environment.python), "-c", code],
        capture_output=True, text=True, check=False, env={**os.environ, **environment.variables},
    )  # fmt: skip
    return dict(sorted(json.loads(done.stdout).items())) if done.returncode == 0 else {}
