"""`verify`: the verdicts, a child that dies or hangs, and the real thing on what is installed."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import types
import zipapp

import pytest

import diffusers_quantfix
from diffusers_quantfix.verify import child, report, rig, run, side, verify
from diffusers_quantfix.verify.case import CannotReproduce, NeedsDevice
from diffusers_quantfix.verify.rig import NO_CODE
from tests.rig.fixtures import require_rig

ANSWER = {
    "id": "a-fix",
    "title": "a bug",
    "state": "applied",
    "reason": "patched in somelib 1.0",
    "above": False,
}


def event(kind: str, text: str = "text") -> dict[str, str]:
    return {"id": "a-fix", "event": kind, "text": text}


@pytest.mark.parametrize(
    ("before", "after", "verdict", "ok"),
    [
        ("bug", "right", report.PATCHED, True),
        ("bug", "bug", report.NOT_PATCHED, False),
        ("right", "right", report.NOT_REPRODUCED, False),
        ("right", "bug", report.NOT_PATCHED, False),
        ("cannot reproduce", "cannot reproduce", report.CANNOT_REPRODUCE, True),
        ("bug", "timed out", report.TIMED_OUT, False),
        ("timed out", "right", report.TIMED_OUT, False),
    ],
)
def test_a_fix_that_applies_is_judged_by_both_runs(before, after, verdict, ok):
    line = run._line(ANSWER, event(before), event(after))
    assert (line.verdict, line.ok) == (verdict, ok)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (True, True, report.CANNOT_REPRODUCE),
        (True, False, report.NOT_PATCHED),
        (False, True, report.NOT_PATCHED),
    ],
)
def test_a_library_that_both_runs_miss_is_no_bug(before, after, verdict):
    """A bitsandbytes older than the installed transformers asks for; sentencepiece, without which no Kolors is."""
    found = run._line(
        ANSWER, {**event("bug"), "unable": before}, {**event("bug", "who asks"), "unable": after}
    )
    assert found.verdict == verdict
    if before and after:
        assert (found.reason, found.ok) == ("who asks", True)


@pytest.mark.parametrize(
    ("error", "unable"),
    [
        (
            ImportError("Using `bitsandbytes` 4-bit quantization requires bitsandbytes: `pip install -U x`"),
            True,
        ),
        (ModuleNotFoundError("No module named 'optimum.quanto.library.extensions'"), False),
        (RuntimeError(f"{NO_CODE}, which has a_name"), True),
        (RuntimeError("pip install"), False),
    ],
)
def test_what_says_that_something_is_missing(error, unable):
    assert child.is_unable(error) is unable


@pytest.mark.parametrize(
    ("state", "above", "verdict", "ok"),
    [
        ("out-of-range", False, report.NOT_NEEDED, True),
        ("failed", False, report.NOT_PATCHED, False),
        ("waiting", False, report.NOT_PATCHED, False),
        ("candidate", False, report.NOT_NEEDED, True),
        # a newer release: before, "not needed" and exit code 0, where `status` says 1
        ("candidate", True, report.NOT_PATCHED, False),
    ],
)
def test_a_fix_that_was_not_run_is_judged_by_its_state(state, above, verdict, ok):
    line = run._line({**ANSWER, "state": state, "above": above}, None, None)
    assert (line.verdict, line.ok) == (verdict, ok)
    assert state in line.reason


CHILD = """
import json, os, sys, time
results = sys.argv[1]
def write(**event):
    with open(results, "a") as file:
        print(json.dumps(event), file=file)
with open(results + ".starts", "a") as file:
    print("start", file=file)
if os.environ.get("DIES_AT_ONCE"):
    print("ImportError: no such library", file=sys.stderr)
    os.abort()
write(event="ready", board=json.loads(os.environ.get("BOARD", '{"fixes": []}')))
if os.environ.get("DIES_IDLE"):
    os.abort()
for fix_id in sys.stdin.readline().split():
    write(id=fix_id, event="begin", text="")
    if fix_id.startswith("dies"):
        os.abort()
    if fix_id.startswith("loses"):
        write(id=fix_id, event="bug", text="an illegal memory access")
        os._exit(0)
    if fix_id.startswith("hangs"):
        time.sleep(600)
    if fix_id.startswith("asserts"):
        assert False, "another output"
    if fix_id.startswith("slow"):
        time.sleep(2.5)
    while fix_id.startswith("waits") and not os.path.exists(os.environ["GO"]):
        time.sleep(0.02)
    write(id=fix_id, event="right", text=os.environ["DIFFUSERS_QUANTFIX"])
"""


class Played:
    """One side whose processes run a program of ours instead of the cases."""

    def __init__(self, folder, *ids: str) -> None:
        self.steps: list[int] = []
        self.side = side.Side("off", str(folder), self.steps.append)
        try:
            self.pump()
            if ids:
                self.side.give(ids)
                self.pump()
        finally:
            self.side.end()
        self.starts = (folder / "results.jsonl.starts").read_text().count("start")

    def pump(self) -> None:
        while self.side.busy:
            self.side.pump()

    def __getitem__(self, fix_id: str) -> tuple[str, str]:
        event = self.side.found[fix_id]
        return event["event"], event["text"]


@pytest.fixture
def play(monkeypatch, tmp_path):
    command = lambda self: [sys.executable, "-c", CHILD, self._results, self._work]  # noqa: E731
    monkeypatch.setattr(side.Side, "_command", command)
    return lambda *ids: Played(tmp_path / "side", *ids)


def test_one_process_runs_all_cases_with_the_setting_of_its_side(play):
    played = play("first", "second", "last")
    assert played["first"] == played["second"] == played["last"] == ("right", "off")
    assert (played.starts, sum(played.steps)) == (1, 3)
    assert played.side.board == {"fixes": []}


def test_a_case_that_kills_its_process_costs_only_itself(play):
    played = play("first", "dies-1", "between", "dies-2", "last")
    assert played["first"] == played["between"] == played["last"] == ("right", "off")
    assert played["dies-1"] == played["dies-2"] == ("bug", "the process was killed by SIGABRT")
    assert (played.starts, sum(played.steps)) == (3, 5), "the progress bar ends full"


def test_a_case_that_loses_the_device_costs_only_itself(play):
    """After an illegal memory access on a GPU, no operation of that process works there any more."""
    played = play("loses-1", "loses-2", "between", "loses-3", "last")
    assert played["between"] == played["last"] == ("right", "off")
    assert {played[f"loses-{number}"] for number in (1, 2, 3)} == {("bug", "an illegal memory access")}
    assert (played.starts, sum(played.steps)) == (4, 5)


class Ended(Exception):
    pass


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_device_that_is_lost_ends_the_process(monkeypatch, tmp_path, lost, late):
    """Devices take time: what a case did wrong there may show in the next operation only."""

    class Device:
        def is_initialized(self):
            return True

        def synchronize(self):
            if lost:
                raise RuntimeError("an illegal memory access")

    def case(folder):
        if not late:
            raise ValueError("a case that fails")
        return "right"

    def end(code):
        raise Ended

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=Device()))
    monkeypatch.setattr(child, "_case", lambda fix_id: case)
    monkeypatch.setattr(child.os, "_exit", end)
    events = []
    with pytest.raises(Ended) if lost else contextlib.nullcontext():
        child._show("a-fix", str(tmp_path), lambda **event: events.append(event["event"]))
    assert events == ["begin", "right" if late and not lost else "bug"]


def test_the_assertions_of_the_cases_count_where_python_is_told_to_drop_them(play, monkeypatch):
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    assert play("first", "asserts")["asserts"][0] == "bug"


def test_a_case_that_hangs_costs_only_itself(play, monkeypatch):
    monkeypatch.setattr(side, "CASE_LIMIT", 1.0)
    played = play("first", "hangs", "last")
    assert played["first"] == played["last"] == ("right", "off")
    assert played["hangs"] == ("timed out", "timed out after 1 s")


def test_a_case_that_waits_for_a_processor_does_not_hang(play, monkeypatch):
    begun = time.monotonic()
    monkeypatch.setattr(side, "CASE_LIMIT", 1.0)
    monkeypatch.setattr(side, "_waited", lambda pid: time.monotonic() - begun)  # others run all the time
    assert play("first", "slow")["slow"] == ("right", "off")


def test_a_process_tells_how_long_it_waited_for_a_processor():
    if not os.path.exists("/proc/self/schedstat"):
        assert side._waited(os.getpid()) == 0.0
        return
    nice = [sys.executable, "-c", "import os\nos.nice(19)\nprint(flush=True)\nwhile True: pass"]
    # More of them than processors: they have to wait for each other.
    busy = [subprocess.Popen(nice, stdout=subprocess.PIPE) for _ in range(1 + (os.cpu_count() or 1))]
    try:
        until = time.monotonic() + 60
        while not all(side._waited(process.pid) for process in busy[:1]) and time.monotonic() < until:
            time.sleep(0.05)
        assert side._waited(busy[0].pid) > 0
    finally:
        for process in busy:
            process.kill()
            process.communicate()
    assert side._waited(busy[0].pid) == 0.0, "it has ended"


def test_a_process_that_dies_between_its_cases_ends_the_side(play, monkeypatch):
    monkeypatch.setenv("DIES_IDLE", "1")
    played = play("first", "last")
    assert played["first"] == played["last"] == ("bug", "the process was killed by SIGABRT")
    assert sum(played.steps) == 2


def test_libraries_that_end_the_process_are_one_sentence(play, monkeypatch):
    monkeypatch.setenv("DIES_AT_ONCE", "1")
    with pytest.raises(RuntimeError, match=r"killed by SIGABRT \(ImportError: no such library\)"):
        play()


def test_results_are_shown_as_they_are_found(play, monkeypatch, tmp_path):
    answers = [{**ANSWER, "id": name} for name in ("first", "waits")]
    answers.append({**ANSWER, "id": "no-need", "state": "healthy"})
    monkeypatch.setenv(
        "BOARD",
        json.dumps(
            {"fixes": [{**one, "targets": [one]} for one in answers], "installed": {"somelib": "1.0"}}
        ),
    )
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    monkeypatch.setenv("DIFFUSERS_QUANTFIX", "")
    monkeypatch.setattr(run, "target_names", lambda ids: ["first", "waits", "no-need"])
    shown: list[str] = []

    def show(part: str) -> None:
        shown.append(part)
        if "first" in part:
            (tmp_path / "go").touch()  # the other case ends only now

    made = run.verify(show=show)
    heads = [part.splitlines()[0].split()[-1] for part in shown[:-1]]
    assert (heads[0], {*heads[1:3]}, heads[3]) == ("1.0", {"no-need", "first"}, "waits")
    assert set(shown) == {report.heading(made.installed), *map(str, made.lines), made.summary()}


def test_a_time_out_says_so_and_is_counted_apart():
    hung = run._line(ANSWER, event("bug"), event("timed out", "timed out after 120 s"))
    assert hung.reason == "timed out after 120 s with it"
    text = str(report.Report([hung], {"somelib": "1.0"}, 1.0))
    assert "1 timed out (1 s)" in text
    assert report.NOT_PATCHED not in text


def test_the_last_lines_name_what_is_wrong():
    """A report of two hundred fixes is read from its end, in a terminal as in the log of a CI."""
    lines = [
        run._line({**ANSWER, "id": name}, event("bug"), event(after, f"{name} ended {after}"))
        for name, after in (("fine", "right"), ("still-wrong", "bug"))
    ]
    last = str(report.Report(lines, {"somelib": "1.0"}, 1.0)).splitlines()[-2:]
    assert last == [
        "1 patched, 1 NOT PATCHED (1 s)", "NOT PATCHED       still-wrong: still-wrong ended bug",
    ]  # fmt: skip


def test_one_id_imports_its_own_library_only(tmp_path):
    pytest.importorskip("bitsandbytes", reason="the stack is not installed")
    results = tmp_path / "results"
    program = (
        "import sys; from diffusers_quantfix.verify import child; child.main(*sys.argv[1:]); "
        "print(*[name for name in ('bitsandbytes', 'diffusers', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, results, tmp_path, "bnb-params-pickle"],
        input="", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[-1:] == ["bitsandbytes"]
    (ready,) = [json.loads(line) for line in results.read_text().splitlines()]
    (answer,) = [answer for answer in ready["board"]["fixes"] if answer["id"] == "bnb-params-pickle"]
    assert answer["state"] == "applied"


@pytest.mark.long
def test_from_a_zipapp_the_cases_of_its_own_copy_run(tmp_path):
    pytest.importorskip("bitsandbytes", reason="the stack is not installed")
    package = tmp_path / "content" / "diffusers_quantfix"
    shutil.copytree(diffusers_quantfix.__path__[0], package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "verify" / "cases" / "bnb_params_pickle.py").write_text(
        "def case(work): return 'its own copy'\n"
    )
    start = "from diffusers_quantfix.__main__ import main; raise SystemExit(main())"
    (tmp_path / "content" / "__main__.py").write_text(start)
    zipapp.create_archive(tmp_path / "content", tmp_path / "app.pyz")
    done = subprocess.run(
        [sys.executable, "app.pyz", "verify", "--json", "bnb-params-pickle"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    (line,) = json.loads(done.stdout)["fixes"]
    assert (line["before"], line["after"]) == ("its own copy", "its own copy"), done.stderr


class Unusual(BaseException):
    """An error that is no `Exception`; before, it ended the process of all cases."""


def test_what_needs_a_device_runs_on_the_rig_at_the_end(monkeypatch, tmp_path):
    inside = []

    @contextlib.contextmanager
    def devices():
        inside.append("entered")
        yield
        inside.clear()

    def case_of(fix_id: str):
        def case(work: str) -> str:
            assert os.path.isdir(work)
            if fix_id == "upstream":
                raise ValueError("an error")
            if fix_id == "unusual":
                raise Unusual("as torch.distributed.checkpoint raises")
            if fix_id == "fails":
                raise AssertionError("a sentence")  # pytest adds to what an assert says
            if fix_id == "no-gpu":
                raise CannotReproduce("this machine lacks it")
            if fix_id == "three" or (fix_id == "gpu" and not inside):
                raise NeedsDevice(f"needs {fix_id}")
            return f"ran {inside}"

        return case

    monkeypatch.setattr(child, "_case", case_of)
    monkeypatch.setattr(child, "_may_crash", lambda fix_id: fix_id == "crashes")
    # As if this were a case of the package: its assertions are sentences.
    monkeypatch.setitem(globals(), "__name__", f"{child.__package__}.cases")
    found: dict[str, dict[str, object]] = {}
    order = []

    def write(**event: object) -> None:
        order.append((event["event"], event["id"]))
        found[str(event["id"])] = event

    ids = ["crashes", "gpu", "three", "plain", "fails", "upstream", "unusual", "no-gpu"]
    child._run(ids, str(tmp_path / "rig"), write, devices)
    assert {fix_id: (event["event"], event["text"]) for fix_id, event in found.items()} == {
        "gpu": ("right", "ran ['entered']"),
        "three": ("cannot reproduce", "needs three, and the rig has no such device"),
        "plain": ("right", "ran []"),
        "fails": ("bug", "a sentence"),
        "upstream": ("bug", "ValueError: an error"),
        "unusual": ("bug", "Unusual: as torch.distributed.checkpoint raises"),
        "no-gpu": ("cannot reproduce", "this machine lacks it"),
        "crashes": ("right", "ran []"),
    }
    assert found["gpu"]["on_rig"] is True and found["plain"]["on_rig"] is False
    begun = [fix_id for kind, fix_id in order if kind == "begin"]
    assert begun[-3:] == ["gpu", "three", "crashes"], "after all others"
    child._run(["gpu"], str(tmp_path / "none"), write, None)
    assert found["gpu"] == {
        "event": "cannot reproduce", "id": "gpu", "text": "needs gpu", "needs_device": True
    }  # fmt: skip


def test_how_to_get_the_rest(monkeypatch, tmp_path):
    assert rig.is_here(), "these tests lie in a clone"
    assert rig.advice(0, False, "") == rig.advice(3, True, "") == rig.advice(0, True, "") == ""
    assert rig.advice(3, False, "").startswith(
        "3 bugs need a CUDA device: `verify --rig` reproduces them on "
    )
    assert rig.advice(2, True, "no compiler") == "without the rig: no compiler; 2 bugs need a CUDA device"
    monkeypatch.setattr(rig, "_CLONE", str(tmp_path))
    assert not rig.is_here(), "as in an installed wheel"
    assert rig.advice(1, False, "").startswith("1 bug needs a CUDA device: run this where there is one, or ")


@pytest.mark.long
def test_the_rig_from_the_command_line():
    pytest.importorskip("bitsandbytes", reason="the stack is not installed")
    require_rig()
    words = [sys.executable, "-m", "diffusers_quantfix", "verify", "--rig", "bnb-params4bit-shared-state"]
    found = {}
    for compiler in ("", "/nowhere/g++"):
        environment = {**os.environ, **({"CXX": compiler} if compiler else {})}
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        found[compiler] = " ".join(done.stdout.split())
    assert "patched bnb-params4bit-shared-state (on the rig) " in found[""]
    assert found[""].startswith("verified on ") and "without the rig" not in found[""]
    assert "cannot reproduce bnb-params4bit-shared-state " in found["/nowhere/g++"]
    assert found["/nowhere/g++"].endswith(
        "without the rig: no C++ compiler was found (looked for /nowhere/g++); 1 bug needs a CUDA device"
    )


def test_a_package_that_is_switched_off_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", "verify", "bnb-quant-state-code"],
        env={**os.environ, "DIFFUSERS_QUANTFIX": "off"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.endswith("switched off by DIFFUSERS_QUANTFIX: unset it, and verify again\n")
    assert "Traceback" not in done.stderr


def test_nothing_installed_is_one_sentence():
    program = (
        "import sys\n"
        "from diffusers_quantfix.commands import verify\n"
        "verify.installed_version = lambda name: '2.13' if name == 'torch' else None\n"
        "from diffusers_quantfix.__main__ import main; sys.exit(main(['verify']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    said = " ".join(done.stdout.split())
    assert said.startswith("none of the libraries that are patched (diffusers,")
    assert sys.executable in said


@pytest.mark.long
@pytest.mark.parametrize("begun", [False, True], ids=["while it imports", "in a case"])
def test_a_signal_ends_the_processes_and_removes_the_folder(tmp_path, begun):
    pytest.importorskip("bitsandbytes", reason="the stack is not installed")
    psutil = pytest.importorskip("psutil")
    verifying = subprocess.Popen(
        [sys.executable, "-m", "diffusers_quantfix", "verify", "bnb-quant-state-meta"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    children: list = []
    while verifying.poll() is None and (len(children) < 2 or (begun and not _begun(tmp_path))):
        children = psutil.Process(verifying.pid).children()
        time.sleep(0.05)
    verifying.send_signal(signal.SIGTERM)
    _, errors = verifying.communicate()
    assert verifying.returncode == -signal.SIGTERM and "Traceback" not in errors, errors
    assert not psutil.wait_procs(children, timeout=0)[1]
    assert not list(tmp_path.glob("quantfix-verify-*"))


def _begun(folder) -> bool:
    return any('"begin"' in file.read_text() for file in folder.glob("*/*/results.jsonl"))


def test_an_unknown_id_is_one_sentence():
    with pytest.raises(ValueError, match="no fix is called 'no-such-fix'"):
        verify(["no-such-fix"])
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", "verify", "no-such-fix"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no fix is called 'no-such-fix'" in done.stderr


WITHOUT = """
import importlib.machinery as machinery
find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = lambda name, *rest: None if name in {names} else find(name, *rest)
"""


@pytest.mark.long
def test_every_bug_that_applies_here_is_patched(tmp_path):
    """The main job, as a user runs it, who has not what only our tests need; red without the package, right with it."""
    pytest.importorskip("torch", reason="the stack is not installed: nothing to verify")
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(names=("sentencepiece", "ftfy", "matplotlib")))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = used.ru_utime + used.ru_stime
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", "verify", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    found = json.loads(done.stdout)
    bad = (report.NOT_PATCHED, report.NOT_REPRODUCED, report.TIMED_OUT)
    wrong = [line for line in found["fixes"] if line["verdict"] in bad]
    assert not wrong, wrong
    assert done.returncode == 0
    assert any(line["verdict"] == report.PATCHED for line in found["fixes"])
    # Under 90 s with two cores of its own; the time of the processors does not depend on who else is at work.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime - spent < 120
    for line in found["fixes"]:
        if "the process was killed" in line["before"]:
            assert child._may_crash(line["id"]), "what comes after it needs a new process"
        if line["verdict"] == report.PATCHED:
            assert line["before"] and line["after"] and line["before"] != line["after"]


COMPILE_NOTHING = """
import sys, diffusers_quantfix
from diffusers_quantfix.verify import child
from optimum.quanto.library.extensions import cpp, extension
extension.load = None
for folder in sys.argv[1:]:
    cpp.ext.build_directory, cpp.ext._lib = folder, None
    child._compile_nothing()
    print(type(cpp.ext.lib).__name__, vars(cpp.ext.lib).get("here", 0))
"""
EXTENSION = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "quanto_cpp", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_quanto_cpp(void) {
    PyObject *made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "here", 1);
    return made;
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> bytes:
    """An extension as quanto leaves it behind."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("extension")
    (folder / "quanto_cpp.c").write_text(EXTENSION)
    include = f"-I{sysconfig.get_path('include')}"
    words = [compiler, "-shared", "-fPIC", include, folder / "quanto_cpp.c", "-o", folder / "quanto_cpp.so"]
    subprocess.run(words, check=True)
    return (folder / "quanto_cpp.so").read_bytes()


@pytest.mark.long
def test_nothing_is_compiled(tmp_path, compiled):
    """A case that is killed while quanto compiles would leave a lock in the user's environment."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed", exc_type=ImportError)
    # One process for all folders: it imports quanto and diffusers.
    expected = {
        (): "StandIn 0",
        ("quanto_cpp.so", "pytorch_version.txt"): "module 1",
        ("quanto_cpp.so", "pytorch_version.txt", "lock"): "StandIn 0",
        ("quanto_cpp.so",): "StandIn 0",
        ("pytorch_version.txt",): "StandIn 0",
    }
    folders = [tmp_path / str(number) for number in range(len(expected))]
    for folder, files in zip(folders, expected, strict=True):
        folder.mkdir()
        for name in files:
            (folder / name).write_bytes(compiled if name.endswith(".so") else torch.__version__.encode())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE_NOTHING, *map(str, folders)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == list(expected.values()), done.stderr[-2000:]
    for folder, files in zip(folders, expected, strict=True):
        assert sorted(path.name for path in folder.iterdir()) == sorted(files)
