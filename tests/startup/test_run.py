"""``run``: argv, path, exit code, ``__main__`` and children are those of a plain ``python``."""

from __future__ import annotations

import re

import pytest

from tests.startup.conftest import ACTIVE, Environment, checked

PROGRAM = """
import os, sys, subprocess
print(sys.argv[1:], __name__, os.path.basename(__file__), sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
print("diffusers_quantfix" in sys.modules)
print(subprocess.run([sys.executable, "-c", "print(ACTIVE)"], capture_output=True, text=True).stdout.strip())
sys.exit(7)
""".replace("ACTIVE", ACTIVE)


def test_a_script(environment: Environment):
    folder = environment.folder / "scripts"
    folder.mkdir()
    (folder / "app.py").write_text(PROGRAM)
    done = environment.run("-m", "diffusers_quantfix", "run", folder / "app.py", "--flag", "-m", "x")
    assert done.stdout.splitlines() == ["['--flag', '-m', 'x'] __main__ app.py True", "True", "True"], (
        done.stderr
    )
    assert done.returncode == 7


def test_a_module(environment: Environment):
    package = environment.folder / "apps"
    package.mkdir()
    (package / "__main__.py").write_text(
        "import sys; print(sys.argv[1:], __name__, __package__); sys.exit(3)"
    )
    (package / "__init__.py").write_text("")
    done = environment.run("-m", "diffusers_quantfix", "run", "-m", "apps", "a", "-b")
    assert done.stdout.strip() == "['a', '-b'] __main__ apps", done.stderr
    assert done.returncode == 3


def test_the_console_script_runs_modules_of_the_working_directory(environment: Environment):
    import subprocess

    (environment.folder / "here.py").write_text("print('here')")
    script = environment.folder / "bin" / "diffusers-quantfix"
    done = subprocess.run(
        [script, "run", "-m", "here"], capture_output=True, text=True, cwd=environment.folder, env={}
    )
    assert checked(done).stdout.strip() == "here"


def test_spawned_processes_find_the_program(environment: Environment):
    program = environment.folder / "spawns.py"
    program.write_text(
        "import multiprocessing as m, sys\n"
        f"def work(x): return x + 1, {ACTIVE}\n"
        "if __name__ == '__main__':\n"
        "    with m.get_context('spawn').Pool(1) as pool: print(pool.map(work, [1]))\n"
    )
    done = checked(environment.run("-m", "diffusers_quantfix", "run", program))
    assert done.stdout.strip() == "[(2, True)]"


FAILS = """
import sys
def deep():
    raise {error}
def outer():
    try:
        deep()
    except Exception as error:
        raise ValueError("outer") from error
{how}
"""


@pytest.mark.parametrize(
    ("error", "how"),
    [
        ("KeyError('a key')", "deep()"),
        ("KeyError('a key')", "outer()"),
        ("KeyboardInterrupt", "deep()"),
        ("SystemExit(5)", "deep()"),
        ("SystemExit('a sentence')", "deep()"),
        ("KeyError('a key')", "compile('x = (', 'generated.py', 'exec')"),
        (
            "KeyError('a key')",
            "sys.excepthook = lambda *a: print('own hook', a[:2])\ndeep()",
        ),
    ],
)
@pytest.mark.parametrize("module", [False, True])
def test_an_error_looks_as_without_us(environment: Environment, error, how, module):
    program = environment.folder / "fails.py"
    program.write_text(FAILS.format(error=error, how=how))
    arguments = ["-m", "fails"] if module else [program]
    ours = environment.run("-m", "diffusers_quantfix", "run", *arguments)
    plain = environment.run(*arguments)
    without_runpy = re.sub(r'  File "[^"]*runpy[^"]*", .*\n(    .*\n)*', "", plain.stderr)
    assert ours.stderr == without_runpy
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)


def test_a_crash_of_a_defect_that_is_not_patched_ends_with_a_hint(environment: Environment):
    program = environment.folder / "crashes.py"
    program.write_text('raise RuntimeError("No GPU found. A GPU is needed for quantization.")')
    plain = environment.run(program)
    done = environment.run(
        "-m", "diffusers_quantfix", "run", program, DIFFUSERS_QUANTFIX="skip:diffusers-cpu-only"
    )
    assert done.returncode == plain.returncode == 1
    assert done.stderr.startswith(plain.stderr)
    (hint,) = done.stderr[len(plain.stderr) :].splitlines()
    assert hint.startswith(
        "diffusers-quantfix: this looks like diffusers-cpu-only, which is not patched here: switched off by "
        "DIFFUSERS_QUANTFIX=skip:diffusers-cpu-only; "
    )
    # Nothing to say where the fix is not refused, or where the error is nobody's.
    for settings, text in (("", program.read_text()), ("off", "raise RuntimeError('something else')")):
        program.write_text(text)
        done = environment.run("-m", "diffusers_quantfix", "run", program, DIFFUSERS_QUANTFIX=settings)
        assert "diffusers-quantfix:" not in done.stderr


def test_a_console_script_of_this_environment(environment: Environment):
    script = environment.folder / "bin" / "a-script"
    script.write_text(
        f"#!{environment.folder}/bin/python\nimport sys\nprint(sys.argv[1:], {ACTIVE})\nsys.exit(4)\n"
    )
    done = environment.run("-m", "diffusers_quantfix", "run", "a-script", "launch", "--flag")
    assert (done.returncode, done.stdout) == (4, "['launch', '--flag'] True\n"), done.stderr
    other = environment.run("-m", "diffusers_quantfix", "run", "sh", "-c", "true", PATH="/usr/bin:/bin")
    assert other.returncode == 2
    assert "type: DIFFUSERS_QUANTFIX_AUTO=1 sh ..." in other.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name a script"),
        (["-m"], "name a script"),
        (["--frob"], "name a script"),
        (["nothing.py"], "there is no file 'nothing.py'"),
        (["-m", "nothing.at.all"], "no module named 'nothing.at.all'"),
    ],
)
def test_wrong_usage_is_one_sentence(environment: Environment, arguments: list[str], sentence: str):
    done = environment.run("-m", "diffusers_quantfix", "run", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
