"""What a start of the interpreter costs, and the import of this package and of the libraries."""

from __future__ import annotations

import contextlib
import gc
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from .figure import Row, figure
from .measure import ROOT, CannotMeasure, child, environment, interleaved, ratio

RUNS = 60
# What others put into every start of an interpreter, as their users switch it on: requirement, variables, command.
PEERS = {
    "pip-system-certs": ("pip-system-certs", {}, ()),
    "coverage (process start-up)": ("coverage", {"COVERAGE_PROCESS_START": "rc"}, ()),
    "autowrapt": ("autowrapt", {"AUTOWRAPT_BOOTSTRAP": "none"}, ()),
    "ddtrace-run": ("ddtrace", {"DD_TRACE_ENABLED": "false"}, ("ddtrace-run",)),
    "opentelemetry-instrument": ("opentelemetry-distro", {}, ("opentelemetry-instrument",)),
}


@figure("start")
def start() -> Iterator[Row]:
    """Interpreter starts: the wheel with activation on and off, and the peers, against a bare environment."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        wheel = _wheel(folder)
        bare = _environment(folder / "bare")
        ours = _environment(folder / "ours", str(wheel), "wrapt", "packaging")
        (next((folder / "ours").glob("lib/python*/site-packages")) / "empty.py").touch()
        clean = environment()
        del clean["PYTHONPATH"]
        floor = _environment(folder / "floor", str(wheel), "wrapt", "packaging")
        site = next((folder / "floor").glob("lib/python*/site-packages"))
        for file in (
            *site.glob("diffusers_quantfix_startup.*"),
            *site.glob("diffusers_quantfix_startup/*.*"),
        ):
            file.unlink()
        (site / "empty.py").touch()
        (site / "empty.pth").write_text("import empty\n")
        commands = {
            "bare": ([bare, "-c", "pass"], clean),
            "floor": ([floor, "-c", "pass"], clean),
            "off": ([ours, "-c", "pass"], clean),
            "on": ([ours, "-c", "pass"], clean | {"DIFFUSERS_QUANTFIX_AUTO": "1"}),
            "import": ([ours, "-c", "import diffusers_quantfix"], clean),
            "import empty": ([ours, "-c", "import empty"], clean),
        }
        found = interleaved(commands, RUNS, name)
        for key, what, goal in (
            ("floor", "  the least: a path file that imports an empty module / bare", None),
            ("on", "interpreter start, activation on / bare", 1.03),
            ("off", "interpreter start, installed and not chosen / bare", None),
            ("import", "`import diffusers_quantfix`, no target imported / bare", 1.10),
        ):
            value, detail = ratio(found, key, "bare")
            yield Row(what, value, goal=goal, detail=detail)
        yield from _in_instructions(commands, ours)
        for peer, (requirement, variables, before) in PEERS.items():
            what = f"  peer: {peer} / bare"
            try:
                python = _environment(folder / requirement, requirement)
            except CannotMeasure as error:
                yield Row(what, None, detail=str(error))
                continue
            place = Path(python).parent
            program = [*(str(place / part) for part in before), *([] if before else [python]), "-c", "pass"]
            if before:
                program = [str(place / before[0]), python, "-c", "pass"]
            if "COVERAGE_PROCESS_START" in variables:
                (folder / "rc").write_text("[run]\nparallel = true\n")
                _coverage_start_file(python)
                variables = {"COVERAGE_PROCESS_START": str(folder / "rc")}
            pair = {"bare": commands["bare"], "peer": (program, clean | variables)}
            try:
                value, detail = ratio(interleaved(pair, RUNS // 4, name), "peer", "bare")
            except CannotMeasure as error:
                yield Row(what, None, detail=str(error))
                continue
            yield Row(what, value, detail=detail)


def _in_instructions(commands: dict[str, tuple[list[str], dict[str, str]]], ours: str) -> Iterator[Row]:
    """What a start takes more than one with a path file that imports an empty module, as a share of a bare start.

    Processor time cannot tell this from noise; the number of instructions is the same in every run.
    """
    least = "more than for an empty module, in instructions, of a bare start"
    try:
        counts = {key: _instructions(*command) for key, command in commands.items()}
        subprocess.run([ours, "-m", "diffusers_quantfix", "enable"], check=True, capture_output=True)
        counts["enabled"] = _instructions(*commands["off"])
    except CannotMeasure as error:
        yield Row(least, None, detail=str(error))
        return
    for key, what in (
        ("on", "start, activation on"),
        ("enabled", "start, activation enabled once for the environment"),
        ("off", "start, installed and not chosen"),
        ("import", "`import diffusers_quantfix`, no target imported"),
    ):
        floor = counts["import empty" if key == "import" else "floor"]
        value = (counts[key] - floor) / counts["bare"]
        yield Row(f"{what}: {least}", value, goal=0.01, detail=f"{counts['bare'] / 1e6:.1f} million, bare")


def _instructions(command: list[str], variables: dict[str, str]) -> int:
    """How many instructions a command takes after its first run, by ``valgrind --tool=callgrind``."""
    tool = shutil.which("valgrind")
    if tool is None:
        raise CannotMeasure("valgrind is not here")
    fixed = variables | {"PYTHONHASHSEED": "0"}
    subprocess.run(command, env=fixed, check=True)  # writes the bytecode
    counting = [tool, "--tool=callgrind", "--callgrind-out-file=/dev/null", *command]
    done = subprocess.run(counting, env=fixed, capture_output=True, text=True, check=False)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise CannotMeasure(f"valgrind said: {done.stderr.strip().splitlines()[-1:]}")
    return int(found[1])


PROGRAM = "import diffusers, bitsandbytes; from diffusers import FluxPipeline, FluxTransformer2DModel"


@figure("import")
def imports() -> Iterator[Row]:
    """``import diffusers`` and bitsandbytes, everything that a Flux program needs, with us and without.

    It takes seconds, and a shared machine adds some percent to any of them: the fastest run of each is compared, and
    beside it our own part of one import is told from the rest, within one process.
    """
    variables = environment()
    commands = {
        "without": ([sys.executable, "-c", PROGRAM], variables),
        "with": ([sys.executable, "-c", f"import diffusers_quantfix; {PROGRAM}"], variables),
    }
    value, detail = ratio(interleaved(commands, 12, str(ROOT)), "with", "without", of=min)
    yield Row(
        "import diffusers and bitsandbytes, with us / without", value, goal=1.02, detail=f"{detail}, min"
    )
    parts = [child("start:our_part") for _ in range(5)]
    share = statistics.median(said["ours"] / said["theirs"] for said in parts)
    ours = statistics.median(said["ours"] for said in parts)
    yield Row("  our part of it / the rest, in one process", share, detail=f"{1000 * ours:.0f} ms, 5 runs")
    private = {side: _private_memory(*command) for side, command in commands.items()}
    yield Row(
        "import diffusers and bitsandbytes, private memory more with us than without",
        private["with"] - private["without"],
        "MiB",
        goal=12,
        detail=" / ".join(f"{private[side]:.0f} MiB" for side in ("with", "without")),
    )


def _private_memory(command: list[str], variables: dict[str, str]) -> float:
    """MiB that the program has for itself at its end: not the pages of libraries, which the first operator reads."""
    said = f"{command[-1]}; import pathlib; print(pathlib.Path('/proc/self/smaps_rollup').read_text())"
    done = subprocess.run([*command[:-1], said], env=variables, capture_output=True, text=True, check=False)
    found = re.search(r"Private_Dirty:\s*(\d+) kB", done.stdout)
    if found is None:
        raise CannotMeasure("the system tells no process its private memory")
    return int(found[1]) / 1024


def our_part() -> dict[str, float]:
    """Processor seconds of an import that went into this package and what only it imports, and those of the rest.

    A module of theirs that one of our probes imports first, and theirs would have imported later, is theirs.  Garbage
    collection is off: it takes a quarter of a second from whoever happens to be at work.
    """
    from importlib import machinery

    from diffusers_quantfix import activation

    activation.activate()
    gc.disable()
    spent = {"ours": 0.0, "theirs": 0.0}
    owners = ["theirs"]
    since = time.process_time()

    @contextlib.contextmanager
    def belongs_to(owner: str) -> Iterator[None]:
        charge()
        owners.append(owner)
        try:
            yield
        finally:
            charge()
            owners.pop()

    def charge() -> None:
        nonlocal since
        now = time.process_time()
        spent[owners[-1]] += now - since
        since = now

    execute, arrived = machinery.SourceFileLoader.exec_module, activation._watcher._arrived

    def exec_module(loader: object, module: ModuleType) -> None:
        ours = module.__name__.partition(".")[0] in ("diffusers_quantfix", "wrapt", "packaging")
        with belongs_to(owners[-1] if ours else "theirs"):
            execute(loader, module)

    def timed_arrival(target: str) -> None:
        with belongs_to("ours"):
            arrived(target)

    machinery.SourceFileLoader.exec_module = exec_module
    activation._watcher._arrived = timed_arrival
    exec(PROGRAM, {})
    charge()
    return spent


def _wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMeasure(
            f"the wheel cannot be built: {(done.stdout + done.stderr).strip().splitlines()[-1]}"
        )
    return next(folder.glob("*.whl"))


def _environment(folder: Path, *requirements: str) -> str:
    """The interpreter of a new environment without pip, with the requirements from the registry in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    if requirements:
        command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotMeasure(f"cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


def _coverage_start_file(python: str) -> None:
    """The start-up file that coverage's documentation tells people to write (its newer releases ship it)."""
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    if not list(Path(site).glob("*coverage*.pth")):
        (Path(site) / "coverage_start.pth").write_text("import coverage; coverage.process_startup()\n")
