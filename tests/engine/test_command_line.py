"""``python -m diffusers_quantfix status`` on fake libraries, good and bad."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

import diffusers_quantfix

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
    outcome = simple.command("status")
    assert outcome.code == 0
    assert "applied      fix-f" in outcome.out
    assert "imported to answer: lib.core" in outcome.out
    assert not outcome.err


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
    for arguments in (("statsu",), (), ("status", "--jsno"), ("status", "extra")):
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
    "command", ["check --env", "check --env --json", "--version", "--help", "check --help"]
)
def test_a_full_disk_is_one_sentence(command) -> None:
    done = shell(f"{command} > /dev/full")
    sentence = "diffusers-quantfix: the answer could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, sentence)
    assert shell(f"{command} > /dev/full 2>&1").returncode == 2, "nowhere to say it"


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
    sentence = "packaging is not installed, without which versions cannot be compared; install it"
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


def test_without_wrapt(simple) -> None:
    wraps = "def broken(m): return True\ndef patch(m, ledger): ledger.wrap_wrapt(m, 'f', print)\n"
    simple.fix("a-wraps", body=wraps)
    simple.index = dict(sorted(simple.index.items()))
    outcome = simple.run(
        WITHOUT.format(name="wrapt")
        + "import diffusers_quantfix, lib.core\n"
        + "tell(f=lib.core.f(), states=states('a-wraps', 'fix-f'), why=reason('a-wraps'))"
    )
    assert (outcome["f"], outcome["states"]) == ("patched", ["failed", "applied"])
    assert outcome["why"].startswith("could not be installed: ModuleNotFoundError: ")
    assert "wrapt" in outcome["why"]


def test_when_the_engine_itself_cannot_be_imported(simple) -> None:
    outcome = simple.run(
        "import sys; sys.modules['diffusers_quantfix.engine.runner'] = None\n"
        "import diffusers_quantfix, importlib, lib.core\n"
        "importlib.reload(lib.core)\ntell(f=lib.core.f())"
    )
    assert outcome["f"] == "broken"
    assert outcome.err.count("activation failed, no fixes applied: ModuleNotFoundError") == 1
    assert "Traceback" not in outcome.err
