"""The line after an uncaught error, with the plain import and ``DIFFUSERS_QUANTFIX=hint``."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ERROR = "RuntimeError('No GPU found. A GPU is needed for quantization.')"
SETTING = "hint,skip:diffusers-cpu-only"
HINT = (
    "diffusers-quantfix: this looks like diffusers-cpu-only, which is not patched here: switched off by "
    "DIFFUSERS_QUANTFIX=skip:diffusers-cpu-only; to patch it, remove that setting "
    "(`python -m diffusers_quantfix explain diffusers-cpu-only`)\n"
)


def run(program: str, *options: str, setting: str = SETTING, given: str = "") -> subprocess.CompletedProcess:
    words = [sys.executable, *options, *([] if given else ["-c", program])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DIFFUSERS_QUANTFIX": setting}
    return subprocess.run(
        words, input=given, capture_output=True, text=True, check=False, env=environment, timeout=120
    )


HOOK = "sys.excepthook = lambda kind, error, traceback: print('own hook', error, file=sys.stderr)"


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        ("OURS\nimport sys\nraise ERROR", True),
        ("import sys\nHOOK\nOURS\nraise ERROR", True),
        ("import sys\nOURS\nHOOK\nraise ERROR", True),
        (
            "OURS\ndef f():\n    raise ERROR\ntry:\n    f()\nexcept Exception as e:\n    raise e from None",
            True,
        ),
        ("OURS\nimport atexit\natexit.register(print, 'the last word')\nraise ERROR", True),
        ("OURS\nimport os\nraise ValueError('nothing that we know')", False),
        ("OURS\nraise SystemExit(ERROR)", False),
        ("OURS\nraise SystemExit(5)", False),
        ("OURS\ntry:\n    raise ERROR\nexcept Exception:\n    pass", False),
        (
            "OURS\nclass Odd(BaseException): pass\nraise Odd('No GPU found. A GPU is needed for quantization.')",
            False,
        ),
    ],
)
def test_nothing_but_one_line_is_added(program, ends):
    program = program.replace("HOOK", HOOK).replace("ERROR", ERROR)
    ours = run(program.replace("OURS", "import diffusers_quantfix"))
    plain = run(program.replace("OURS", "import re"))
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr == plain.stderr.replace("import re", "import diffusers_quantfix") + (
        HINT if ends else ""
    )


def test_it_is_a_setting():
    program = f"import diffusers_quantfix\nraise {ERROR}"
    assert "diffusers-quantfix:" not in run(program, setting="skip:diffusers-cpu-only").stderr
    assert "DIFFUSERS_QUANTFIX=off; to patch it" in run(program, setting="hint,off").stderr
    later = f"import os, diffusers_quantfix\nos.environ['DIFFUSERS_QUANTFIX'] = {SETTING!r}\n"
    assert run(f"{later}diffusers_quantfix.apply()\nraise {ERROR}", setting="").stderr.endswith(HINT)


def test_until_then_it_costs_nothing():
    show = "import sys, threading, atexit\nOURS\nprint(*sorted(sys.modules))"
    loaded = [
        set(run(show.replace("OURS", "import diffusers_quantfix"), setting=setting).stdout.split())
        for setting in ("hint", "strict")
    ]
    assert loaded[0] - loaded[1] == {"diffusers_quantfix.uncaught"}
    program = "import sys, diffusers_quantfix\nprint(sys.excepthook is sys.__excepthook__)"
    assert run(program).stdout == "True\n", "software that asks for the plain hook finds it"


THREAD = """
import sys, threading
BEFORE
import diffusers_quantfix
AFTER
def work(): raise ERROR
thread = threading.Thread(target=work, name="worker"); thread.start(); thread.join()
print("goes on")
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("threading.excepthook = lambda a: print('own', a.exc_value)", ""),
        (
            "",
            "old = threading.excepthook\nthreading.excepthook = lambda a: (print('own', a.exc_value), old(a))",
        ),
    ],
)
def test_a_thread(before, after):
    program = THREAD.replace("BEFORE", before).replace("AFTER", after).replace("ERROR", ERROR)
    ours = run(program)
    plain = run(program.replace("import diffusers_quantfix", ""))
    assert ours.returncode == 0
    assert ours.stdout == plain.stdout and "goes on" in ours.stdout
    said = ours.stderr.replace("line 8, in work", "line N").replace("line 7", "line N")
    assert said.endswith(HINT) and said.count("diffusers-quantfix: ") == 1
    assert len(said.splitlines()) == len(plain.stderr.splitlines()) + 1


def test_a_prompt():
    lines = f"import diffusers_quantfix\nraise {ERROR}\nprint('goes on', file=__import__('sys').stderr)\n"
    done = run("", "-i", "-q", given=lines)
    assert done.stderr.count("diffusers-quantfix: ") == 1
    assert done.stderr.index(HINT) < done.stderr.index("goes on\n")


def test_our_own_fault_is_silent():
    broken = "import sys, diffusers_quantfix\nsys.modules['diffusers_quantfix.advisories.crash'] = None\n"
    done = run(f"{broken}raise {ERROR}")
    assert done.returncode == 1
    assert done.stderr.endswith("A GPU is needed for quantization.\n")


def test_a_notebook_cell():
    pytest.importorskip("IPython", reason="IPython is not installed")
    program = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "import sys, diffusers_quantfix\n"
        "from diffusers_quantfix import activation\n"
        "shell = InteractiveShell.instance()\n"
        "activation.activate(); activation.activate()\n"
        f"shell.run_cell({f'raise {ERROR}'!r})\n"
        "print('next', file=sys.stderr)\n"
        "shell.run_cell('1 + 1')\n"
    )
    done = run(program)
    assert done.returncode == 0
    assert done.stderr.index(HINT) < done.stderr.index("next\n")
    assert done.stderr.count("diffusers-quantfix: ") == 1


def test_an_error_is_not_kept():
    """Before: the last error of a thread stayed, with all variables of the functions that it went through."""
    program = f"""
import gc, threading, weakref, diffusers_quantfix
class Activation: pass
def work():
    value = Activation()
    kept.append(weakref.ref(value))
    raise {ERROR}
kept = []
for _ in range(2):
    thread = threading.Thread(target=work); thread.start(); thread.join()
del thread
gc.collect()
print([one() for one in kept])
"""
    done = run(program)
    assert done.stdout == "[None, None]\n", done
    assert "diffusers-quantfix: " in done.stderr
