"""``run``: argv, path, exit code, ``__main__`` and children are those of a plain ``python``."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name a script"),
        (["-m"], "name a script"),
        (["--frob"], "name a script"),
        (["nothing.py"], "there is no file 'nothing.py'"),
        (["-m", "nothing.at.all"], "no module is called 'nothing.at.all'"),
    ],
)
def test_wrong_usage_is_one_sentence(environment: Environment, arguments: list[str], sentence: str):
    done = environment.run("-m", "diffusers_quantfix", "run", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
