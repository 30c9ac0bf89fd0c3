"""``python -m diffusers_quantfix status`` on fake libraries, good and bad."""

from __future__ import annotations

import json

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


def test_a_failed_fix_under_strict_is_an_answer(simple) -> None:
    simple.fix("bad", body="def broken(m): raise ValueError('odd')\ndef mend(m, ledger): pass")
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
    wraps = "def broken(m): return True\ndef mend(m, ledger): ledger.wrap(m, 'f', print)\n"
    simple.fix("a-wraps", body=wraps)
    simple.index = dict(sorted(simple.index.items()))
    outcome = simple.run(
        WITHOUT.format(name="wrapt")
        + "import diffusers_quantfix, lib.core\n"
        + "tell(f=lib.core.f(), states=states('a-wraps', 'fix-f'), why=reason('a-wraps'))"
    )
    assert (outcome["f"], outcome["states"]) == ("mended", ["failed", "applied"])
    assert outcome["why"].startswith("could not be installed: ModuleNotFoundError: ")
    assert "wrapt" in outcome["why"]


def test_when_the_engine_itself_cannot_be_imported(simple) -> None:
    outcome = simple.run(
        "import sys; sys.modules['diffusers_quantfix.engine.runner'] = None\n"
        "import diffusers_quantfix, importlib, lib.core\n"
        "importlib.reload(lib.core)\ntell(f=lib.core.f())"
    )
    assert outcome["f"] == "broken"
    assert outcome.err.count("cannot work, nothing is mended: ModuleNotFoundError") == 1
    assert "Traceback" not in outcome.err
