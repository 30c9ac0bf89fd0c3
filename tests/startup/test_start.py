"""Activation at the start of an interpreter: inert until chosen, quiet when orphaned, light, and in children too."""

from __future__ import annotations

import shutil

import pytest

from tests.engine.test_light_start import OURS
from tests.startup.conftest import Environment, checked

ACTIVE = "import sys; print('diffusers_quantfix' in sys.modules)"


def active(environment: Environment, *flags: str, **variables: str) -> bool:
    return checked(environment.run(*flags, "-c", ACTIVE, **variables)).stdout.strip() == "True"


def test_it_is_inert_until_chosen(environment: Environment):
    assert not active(environment)
    assert active(environment, DIFFUSERS_QUANTFIX_AUTO="1")
    assert not active(environment, DIFFUSERS_QUANTFIX_AUTO="0")
    checked(environment.run("-m", "diffusers_quantfix", "enable"))
    assert active(environment)
    assert not active(environment, DIFFUSERS_QUANTFIX_AUTO="0"), "the variable overrules the choice"
    assert not active(environment, "-S"), "no site, no start-up files"
    assert not active(environment, "-I", "-S")
    checked(environment.run("-m", "diffusers_quantfix", "disable"))
    assert not active(environment)


def test_status_says_how_it_is_activated(environment: Environment):
    def sentence(**variables: str) -> str:
        said = checked(environment.run("-m", "diffusers_quantfix", "status", **variables)).stdout
        return said.splitlines()[-1]

    assert "only where it is imported" in sentence()
    assert "DIFFUSERS_QUANTFIX_AUTO=1" in sentence(DIFFUSERS_QUANTFIX_AUTO="1")
    checked(environment.run("-m", "diffusers_quantfix", "enable"))
    assert "diffusers_quantfix enable" in sentence()
    assert "off, by DIFFUSERS_QUANTFIX_AUTO=0" in sentence(DIFFUSERS_QUANTFIX_AUTO="0")


def test_off_in_the_settings_wins_over_activation(environment: Environment):
    watching = "import sys; print(any(type(f).__name__ == 'Watcher' for f in sys.meta_path))"
    on = environment.run("-c", watching, DIFFUSERS_QUANTFIX_AUTO="1")
    off = environment.run("-c", watching, DIFFUSERS_QUANTFIX_AUTO="1", DIFFUSERS_QUANTFIX="off")
    assert (on.stdout.strip(), off.stdout.strip()) == ("True", "False")


def test_a_start_adds_only_our_own_modules(environment: Environment):
    modules = "import sys; print(*sorted(sys.modules))"
    bare = set(environment.run("-c", modules, DIFFUSERS_QUANTFIX_AUTO="0").stdout.split())
    added = set(environment.run("-c", modules, DIFFUSERS_QUANTFIX_AUTO="1").stdout.split()) - bare
    assert added - {"__future__"} == OURS
    untouched = set(environment.run("-c", modules).stdout.split())
    assert untouched == bare, "without a choice the start-up module alone is loaded"
    without = set(environment.run("-I", "-S", "-c", modules).stdout.split())
    ours = {name for name in bare - without if "quantfix" in name}
    assert ours == {"diffusers_quantfix_startup"}


def test_an_orphaned_start_up_file_says_nothing(own_environment: Environment):
    checked(own_environment.run("-m", "diffusers_quantfix", "enable"))
    shutil.rmtree(own_environment.site / "diffusers_quantfix")
    done = own_environment.run("-c", "print('started')")
    assert (done.stdout.strip(), done.stderr) == ("started", "")


def test_a_choice_that_cannot_be_written_is_one_sentence(own_environment: Environment):
    choice = own_environment.site / "diffusers_quantfix_startup" / "choice"
    choice.unlink()
    choice.mkdir()  # not even root can write this
    done = own_environment.run("-m", "diffusers_quantfix", "enable")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "DIFFUSERS_QUANTFIX_AUTO=1" in done.stderr
    assert not active(own_environment)


CHILDREN = {
    "subprocess": "import subprocess, sys; print(subprocess.run([sys.executable, '-c', CODE], "
    "capture_output=True, text=True).stdout.strip())",
    "fork": "import multiprocessing as m; m.set_start_method('fork'); CHILD",
    "spawn": "import multiprocessing as m; m.set_start_method('spawn'); CHILD",
    "forkserver": "import multiprocessing as m; m.set_start_method('forkserver'); CHILD",
}
PROGRAM = """
import sys
def child(queue):
    queue.put("diffusers_quantfix" in sys.modules)
def main():
    import multiprocessing
    queue = multiprocessing.Queue()
    process = multiprocessing.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=60))
    process.join()
"""


@pytest.mark.parametrize("way", sorted(CHILDREN))
def test_children_are_activated_too(environment: Environment, way: str):
    text = CHILDREN[way].replace("CODE", repr(ACTIVE)).replace("CHILD", "main()")
    program = environment.folder / "program.py"
    program.write_text(PROGRAM + f"if __name__ == '__main__':\n    {text}\n")
    done = checked(environment.run(program, DIFFUSERS_QUANTFIX_AUTO="1"))
    assert done.stdout.strip() == "True"
    assert checked(environment.run(program)).stdout.strip() == "False"


def test_sitecustomize_can_import_it(own_environment: Environment):
    (own_environment.site / "sitecustomize.py").write_text("import diffusers_quantfix\n")
    assert active(own_environment)
    assert active(own_environment, DIFFUSERS_QUANTFIX_AUTO="1"), "both ways at once"
