"""What a start of the interpreter costs, and the import of this package and of the libraries."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .figure import Row, figure
from .measure import ROOT, CannotMeasure, environment, interleaved, ratio

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
        clean = environment()
        del clean["PYTHONPATH"]
        commands = {
            "bare": ([bare, "-c", "pass"], clean),
            "off": ([ours, "-c", "pass"], clean),
            "on": ([ours, "-c", "pass"], clean | {"DIFFUSERS_QUANTFIX_AUTO": "1"}),
            "import": ([ours, "-c", "import diffusers_quantfix"], clean),
        }
        found = interleaved(commands, RUNS, name)
        for key, what, goal in (
            ("on", "interpreter start, activation on / bare", 1.03),
            ("off", "interpreter start, installed and not chosen / bare", None),
            ("import", "`import diffusers_quantfix`, no target imported / bare", 1.10),
        ):
            value, detail = ratio(found, key, "bare")
            yield Row(what, value, goal=goal, detail=detail)
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


@figure("import")
def imports() -> Iterator[Row]:
    """``import diffusers`` and bitsandbytes, everything that a Flux program needs, with us and without."""
    program = "import diffusers, bitsandbytes; from diffusers import FluxPipeline, FluxTransformer2DModel"
    variables = environment()
    commands = {
        "without": ([sys.executable, "-c", program], variables),
        "with": ([sys.executable, "-c", f"import diffusers_quantfix; {program}"], variables),
    }
    value, detail = ratio(interleaved(commands, 8, str(ROOT)), "with", "without")
    yield Row("import diffusers and bitsandbytes, with us / without", value, goal=1.02, detail=detail)


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
