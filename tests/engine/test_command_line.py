"""``python -m diffusers_quantfix status`` on fake libraries, good and bad."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

import diffusers_quantfix
from tests.marks import rest_is_long

NOISE = """
import os, subprocess, sys
print("loud release", flush=True)
sys.__stdout__.write("louder release\\n"); sys.__stdout__.flush()
os.write(1, b"loudest release\\n")
def f(): return "broken"
"""


def test_json_alone_on_stdout_whatever_a_library_prints(world) -> None:
    world.library(core=NOISE)
    world.fix()
    outcome = world.command("status", "--json")
    board = json.loads(outcome.out)
    assert set(board) >= {"quantfix", "python", "installed", "settings", "fixes"}
    assert board["fixes"][0]["state"] == "applied"
    assert outcome.code == 0
    assert all(word in outcome.err for word in ("loud", "louder", "loudest")), "what it said is not lost"


def test_the_table(simple) -> None:
    outcome = simple.command("status", "--all")
    assert outcome.code == 0
    assert outcome.out.startswith(
        "all well: every known bug of these releases is patched\n1 applied\nactivation: "
    )
    assert "applied      fix-f" in outcome.out
    assert "imported to answer: lib.core" in outcome.out
    assert not outcome.err


FAILS = "def broken(m): raise OSError('a disk')\ndef patch(m, draft): pass"
OUTSIDE = "def broken(m): return True\ndef patch(m, draft): pass"


@pytest.mark.parametrize(
    ("change", "first", "listed", "code"),
    [
        ("nothing", "all well: every known bug of these releases is patched", [], 0),
        ("healthy", "all well: these releases have no known bug", [], 0),
        ("failed", "attention needed: 1 failed", ["failed       fix-g"], 1),
        ("candidate", "attention needed: 1 not patched in a new release", ["candidate    fix-g"], 1),
        (
            "below",
            "all known bugs are patched; 1 that should not be in these releases may be",
            ["candidate    fix-g"],
            0,
        ),
        (
            "many fail",
            "attention needed: 30 failed",
            ["failed       30 fixes: many-0, many-1, many-10 and 27"],
            1,
        ),
        (
            "waiting",
            "attention needed: 31 waiting",
            ["waiting      31 fixes: fix-f, many-0, many-1 and 28"],
            1,
        ),
        ("off", "1 not patched, because you switched them off; all else is well", [], 0),
    ],
)
def test_the_first_screen_is_the_answer(world, change, first, listed, code) -> None:
    """24 lines of 80 columns: whether all is well, then what is not; all that is well on request."""
    core = {"healthy": "def f(): return 'fine'", "waiting": "raise RuntimeError('no driver')"}.get(change)
    world.library(core=core or "def f(): return 'broken'")
    world.fix()
    if change == "failed":
        world.fix("fix-g", body=FAILS)
    if change == "candidate":
        world.fix("fix-g", claims={"lib": "<1"}, body=OUTSIDE)
    if change == "below":
        world.fix("fix-g", claims={"lib": ">=2"}, body=OUTSIDE)
    for number in range(30 if change in ("many fail", "waiting") else 0):
        world.fix(f"many-{number}", body=FAILS)
    outcome = world.command("status", settings="off" if change == "off" else "")
    lines = outcome.out.splitlines()
    assert outcome.code == code, outcome.out
    assert lines[0] == first
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    found = [line for line in lines if line.startswith(("failed  ", "candidate  ", "waiting  ", "applied  "))]
    assert [line[: len(want)] for line, want in zip(found, listed, strict=True)] == listed
    assert lines[-1] == "every fix, and why: `python -m diffusers_quantfix status --all`"
    whole = world.command("status", "--all", settings="off" if change == "off" else "").out
    assert all(f" {fix_id}\n" in whole for fix_id in world.targets)


def test_the_summary_alone_and_some_states(simple) -> None:
    simple.fix("fix-g", claims={"lib": "<1"}, body="def broken(m): return True\ndef patch(m, draft): pass")
    brief = simple.command("status", "--brief").out
    assert brief.startswith("1 applied, 1 candidate\ncandidate: fix-g\n")
    assert "title of" not in brief
    only = simple.command("status", "--only", "candidate").out
    assert "title of fix-g" in only and "title of fix-f" not in only
    data = json.loads(simple.command("status", "--only", "applied,failed", "--json").out)
    assert [answer["id"] for answer in data["fixes"]] == ["fix-f"]
    assert (data["summary"]["applied"], data["summary"]["candidate"]) == (["fix-f"], ["fix-g"])
    wrong = simple.command("status", "--only", "aplied")
    assert (wrong.code, wrong.out) == (2, "")
    assert "'aplied' is not a state; the states are applied, " in wrong.err


def test_where_none_of_the_libraries_is_installed(world) -> None:
    world.fix()
    outcome = world.command("status")
    assert outcome.code == 0
    said = " ".join(outcome.out.split())
    assert said.startswith("none of the libraries that are patched (lib) is installed for this interpreter, ")
    assert sys.executable in said
    assert "missing" not in said


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only there the command has a process of its own"
)
@pytest.mark.parametrize(
    ("dies", "how"),
    [
        ("import os\nos.abort()", "the process was killed by SIGABRT"),
        ("import os\nos._exit(7)", "the process ended with exit code 7"),
    ],
)
@pytest.mark.parametrize("command", ["status", "doctor"])
def test_a_library_that_ends_the_process_is_named(world, dies, how, command) -> None:
    world.library(core="import lib.deep", deep=dies)
    world.fix()
    outcome = world.command(command)
    assert outcome.code == 2
    assert (
        f"diffusers-quantfix: {how} while lib was being imported, the last module was lib.deep" in outcome.err
    )
    # `doctor` has said by then what it knows without the libraries.
    assert outcome.out.startswith("installed\n") if command == "doctor" else not outcome.out
    assert "problems" not in outcome.out


def test_a_broken_library_is_one_sentence_and_exit_1(world) -> None:
    world.library(core="raise OSError('libcudart.so: cannot open\\nshared object')")
    world.fix()
    for arguments in (("status",), ("status", "--json")):
        outcome = world.command(*arguments)
        assert outcome.code == 1
        sentence = "lib is installed but cannot be imported: OSError: libcudart.so: cannot open shared object"
        assert sentence in " ".join(outcome.out.split())
        assert "Traceback" not in outcome.err + outcome.out
    (answer,) = json.loads(outcome.out)["fixes"]
    assert (answer["state"], answer["reason"]) == ("waiting", sentence)


def test_nothing_installed_is_no_fault(world) -> None:
    world.fix()
    outcome = world.command("status", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["fixes"][0]["reason"] == "lib is not installed"


def test_wrong_usage(simple) -> None:
    for arguments in (("statsu",), ("status", "--jsno"), ("status", "extra")):
        outcome = simple.command(*arguments)
        assert outcome.code == 2, arguments
        assert "usage: diffusers-quantfix" in outcome.err
        assert "Traceback" not in outcome.err
        assert not outcome.out


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("pins", "see `diffusers-quantfix --help`"),
        ("list", "see `diffusers-quantfix --help`"),
        ("statsu", "did you mean status?"),
        ("stat", "did you mean status?"),
        ("chekc", "did you mean check?"),
    ],
)
def test_only_a_near_command_is_suggested(simple, word, hint) -> None:
    assert simple.command(word).err.endswith(f"no command is called {word!r}; {hint}\n")


def test_the_bare_command_prints_its_help(simple) -> None:
    outcome = simple.command()
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == simple.command("--help").out
    assert all(command in outcome.out for command in ("status", "explain", "verify"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a pseudo terminal")
@pytest.mark.parametrize("columns", rest_is_long([50, 100], 50))
def test_on_a_terminal_something_moves_and_the_answer_fits(world, columns) -> None:
    world.library(core="import time; time.sleep(1.5)\ndef f(): return 'broken'")
    world.fix(title="a few words " * 20)
    world.command("status")  # writes main.py
    said, gaps = on_a_terminal([sys.executable, str(world.folder / "main.py"), "status"], world, columns)
    assert max(gaps) < 1.0, "half a second on a machine that does nothing else"
    assert "importing lib (1 s)" in said
    answer = said.rpartition("\r" + " " * 10)[2].rpartition("\r ")[2].replace("\r\n", "\n")
    assert any(len(line) > columns - 15 for line in answer.splitlines())
    assert max(len(line.rpartition("\r")[2]) for line in answer.splitlines()) <= columns


def on_a_terminal(command: list[str], world, columns: int) -> tuple[str, list[float]]:
    """What a command writes to a terminal, and the seconds between its writes."""
    import fcntl
    import pty
    import struct
    import termios
    import time

    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**world.environment(""), "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(
        command, stdin=there, stdout=there, stderr=there, env=environment, cwd=world.folder
    )
    os.close(there)
    said, gaps, last = b"", [], time.monotonic()
    while True:
        try:
            data = os.read(here, 65536)
        except OSError:  # how Linux says that the other end was closed
            break
        if not data:
            break
        said += data
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    os.close(here)
    process.wait(30)
    return said.decode(), gaps


def test_the_version(simple) -> None:
    outcome = simple.command("--version")
    assert (outcome.code, outcome.out) == (0, f"diffusers_quantfix {diffusers_quantfix.__version__}\n")


def shell(arguments: str) -> subprocess.CompletedProcess[str]:
    command = f"{shlex.quote(sys.executable)} -m diffusers_quantfix {arguments}"
    # Unbuffered, argparse swallows what goes wrong with --help.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize(
    "command", ["status", "check --env", "check --env --json", "doctor", "explain bnb-quant-state-code"]
)
def test_a_closed_standard_output_is_one_sentence(command) -> None:
    done = shell(f"{command} >&-")
    assert (done.returncode, done.stderr) == (2, "diffusers-quantfix: standard output is closed\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize(
    "command", ["check --env", "check --env --json", "--version", "--help", "check --help", "run --help"]
)
def test_a_full_disk_is_one_sentence(command) -> None:
    done = shell(f"{command} > /dev/full")
    sentence = "diffusers-quantfix: the output could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, sentence)
    assert shell(f"{command} > /dev/full 2>&1").returncode == 2, "nowhere to say it"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize(
    "command", ["run", "run no-such-file.py", "run -m no_such_module", "explain no-such-fix"]
)
def test_a_refusal_that_cannot_be_written_has_its_exit_code(command) -> None:
    assert shell(f"{command} 2> /dev/full").returncode == 2


def test_a_closed_standard_input_is_one_sentence() -> None:
    done = shell("check - <&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("diffusers-quantfix: standard input is closed")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_who_left_is_told_nothing() -> None:
    done = shell("check --env --json | true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("raises", "error"),
    [
        (
            "open('/nowhere/at/all')",
            "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/at/all'",
        ),
        ("raise OSError('libcudart.so: cannot open')", "OSError: libcudart.so: cannot open"),
    ],
)
def test_an_error_of_a_command_itself_is_not_taken_for_one_of_the_output(raises, error) -> None:
    program = (
        "import sys; from diffusers_quantfix import __main__ as main; from diffusers_quantfix.commands import check\n"
        f"def run(options): {raises}\n"
        "check.run = run; sys.exit(main.main(['check', '--env']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.endswith(f"{error}\n")


def test_a_failed_fix_under_strict_is_an_answer(simple) -> None:
    simple.fix("bad", body="def broken(m): raise ValueError('odd')\ndef patch(m, ledger): pass")
    for settings in ("", "strict"):
        outcome = simple.command("status", "--json", settings=settings)
        assert outcome.code == 1
        states = {answer["id"]: answer["state"] for answer in json.loads(outcome.out)["fixes"]}
        assert states == {"fix-f": "applied", "bad": "failed"}
        assert "Traceback" not in outcome.err


def test_off_is_an_answer_too(simple) -> None:
    outcome = simple.command("status", "--json", settings="off")
    (answer,) = json.loads(outcome.out)["fixes"]
    assert (outcome.code, answer["state"]) == (0, "disabled")
    assert answer["reason"] == "switched off by DIFFUSERS_QUANTFIX=off"


# Our own dependencies may be gone: `pip install --no-deps`, a half-removed environment.
WITHOUT = "import sys; sys.modules[{name!r}] = None\n"


def test_without_packaging(simple) -> None:
    simple.fix("fix-g")
    sentence = "packaging is not installed, and versions cannot be compared without it; install it"
    outcome = simple.run(
        WITHOUT.format(name="packaging")
        + "import diffusers_quantfix, lib.core\n"
        + "tell(f=lib.core.f(), states=states('fix-f', 'fix-g'), why=reason('fix-f'))"
    )
    assert outcome.told == {"f": "broken", "states": ["failed", "failed"], "why": sentence}
    assert outcome.err.count(sentence) == 1
    command = simple.command("status", before=WITHOUT.format(name="packaging"))
    assert command.code == 1
    assert sentence in " ".join(command.out.split())
    assert "Traceback" not in command.err


def test_when_the_engine_itself_cannot_be_imported(simple) -> None:
    outcome = simple.run(
        "import sys; sys.modules['diffusers_quantfix.engine.runner'] = None\n"
        "import diffusers_quantfix, importlib, lib.core\n"
        "importlib.reload(lib.core)\ntell(f=lib.core.f())"
    )
    assert outcome["f"] == "broken"
    assert outcome.err.count("activation failed, no fixes applied: ModuleNotFoundError") == 1
    assert "Traceback" not in outcome.err
