"""Activation at the start of an interpreter: inert until chosen, quiet when orphaned, light, and in children too."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import types
import zipapp

import pytest

from diffusers_quantfix.commands import startup as command
from tests.engine.harness import FINDERS
from tests.engine.test_light_start import WITH_A_LIBRARY
from tests.startup.conftest import ACTIVE, Environment, checked

ASK = f"import sys; print({ACTIVE})"


def active(environment: Environment, *flags: str, **variables: str) -> bool:
    return checked(environment.run(*flags, "-c", ASK, **variables)).stdout.strip() == "True"


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
        return " ".join(said.partition("activation: ")[2].split())

    assert "only where it is imported" in sentence()
    assert "DIFFUSERS_QUANTFIX_AUTO=1" in sentence(DIFFUSERS_QUANTFIX_AUTO="1")
    checked(environment.run("-m", "diffusers_quantfix", "enable"))
    assert "diffusers_quantfix enable" in sentence()
    assert "off, by DIFFUSERS_QUANTFIX_AUTO=0" in sentence(DIFFUSERS_QUANTFIX_AUTO="0")


@pytest.mark.parametrize("word", ["1", "true", "yes", "on", "True", "YES", " on "])
def test_the_usual_words_of_yes(environment: Environment, word: str):
    """All but "1" meant off, without a word."""
    done = environment.run("-c", ASK, DIFFUSERS_QUANTFIX_AUTO=word)
    assert (done.stdout.strip(), done.stderr) == ("True", "")


@pytest.mark.parametrize("word", ["0", "false", "no", "off", "OFF", ""])
def test_the_usual_words_of_no(environment: Environment, word: str):
    done = environment.run("-c", ASK, DIFFUSERS_QUANTFIX_AUTO=word)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_another_word_is_reported_once_and_means_no(environment: Environment):
    done = environment.run("-c", ASK, DIFFUSERS_QUANTFIX_AUTO="ja")
    assert done.stdout.strip() == "False"
    assert (
        done.stderr.count("DIFFUSERS_QUANTFIX_AUTO=ja is neither 1, true, yes, on nor 0, false, no, off") == 1
    )
    said = checked(environment.run("-m", "diffusers_quantfix", "status", DIFFUSERS_QUANTFIX_AUTO="ja")).stdout
    assert "DIFFUSERS_QUANTFIX_AUTO=ja is neither" in " ".join(said.split())


def test_enable_names_the_environment(environment: Environment):
    said = checked(environment.run("-m", "diffusers_quantfix", "enable")).stdout
    assert str(environment.folder) in said


def test_enable_refuses_where_no_start_up_file_is_run(environment: Environment, wheel, tmp_path):
    """`pip install --target` and PYTHONPATH: it said "at every start", and nothing happened at any."""
    bare = tmp_path / "bare"
    checked(subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], capture_output=True, text=True,
                           check=False))  # fmt: skip
    target = tmp_path / "target"
    shutil.copytree(environment.site, target, symlinks=True)
    other = Environment(bare)
    done = other.run("-m", "diffusers_quantfix", "enable", PYTHONPATH=str(target))
    assert done.returncode == 2, done.stdout
    assert "does not run the start-up file" in done.stderr and "sitecustomize" in done.stderr
    assert "Traceback" not in done.stderr
    assert (target / "diffusers_quantfix_startup" / "choice").read_text() == ""


def test_enable_from_a_zipapp_does_not_speak_of_the_variable(environment: Environment, tmp_path):
    """Its choice cannot be written, and DIFFUSERS_QUANTFIX_AUTO=1 is read by nobody there."""
    bare, content = tmp_path / "bare", tmp_path / "content"
    checked(subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], capture_output=True, text=True,
                           check=False))  # fmt: skip
    shutil.copytree(environment.site, content)
    start = "import runpy; runpy.run_module('diffusers_quantfix.__main__', None, '__main__')"
    (content / "__main__.py").write_text(start)
    zipapp.create_archive(content, tmp_path / "app.pyz")
    done = Environment(bare).run(tmp_path / "app.pyz", "enable")
    assert done.returncode == 2, done.stdout
    assert "does not run the start-up file" in done.stderr and "sitecustomize" in done.stderr
    assert "DIFFUSERS_QUANTFIX_AUTO" not in done.stderr and "Traceback" not in done.stderr


def test_enable_where_the_choice_cannot_be_written(environment: Environment):
    """An image that is mounted read-only: the variable is the way there."""
    program = """
        import errno, os, sys
        def replace(*paths):
            raise OSError(errno.EROFS, "Read-only file system")
        os.replace = replace
        from diffusers_quantfix.__main__ import main
        sys.exit(main(["enable"]))
    """
    done = environment.run("-c", textwrap.dedent(program))
    assert done.returncode == 2, done.stdout
    assert "Read-only file system; set DIFFUSERS_QUANTFIX_AUTO=1 in the environment" in done.stderr
    assert not active(environment)


@pytest.mark.parametrize(("file", "name"), [("pipx_metadata.json", "pipx"), ("uv-receipt.toml", "uv tool")])
def test_enable_in_the_private_environment_of_a_tool(own_environment: Environment, file: str, name: str):
    (own_environment.folder / file).write_text("{}")
    done = own_environment.run("-m", "diffusers_quantfix", "enable")
    assert done.returncode == 2
    assert f"a private environment of {name}" in done.stderr
    assert not active(own_environment)
    (own_environment.site / "diffusers.py").write_text("")  # a tool that uses one of the libraries
    done = checked(own_environment.run("-m", "diffusers_quantfix", "enable"))
    assert f"a private environment of {name}" in done.stdout
    assert active(own_environment)


def test_off_in_the_settings_wins_over_activation(environment: Environment):
    watching = f"import sys; {ACTIVE}; print(any(type(f).__name__ == 'Watcher' for f in sys.meta_path))"
    on = environment.run("-c", watching, DIFFUSERS_QUANTFIX_AUTO="1")
    off = environment.run("-c", watching, DIFFUSERS_QUANTFIX_AUTO="1", DIFFUSERS_QUANTFIX="off")
    assert (on.stdout.strip(), off.stdout.strip()) == ("True", "False")


def test_a_start_adds_nothing_until_a_library_is_asked_for(environment: Environment):
    modules = "import sys, importlib.util; {}; print(*sorted(sys.modules))"
    asked = modules.format("importlib.util.find_spec('bitsandbytes')")

    def loaded(program: str, *flags: str, **variables: str) -> set[str]:
        return set(checked(environment.run(*flags, "-c", program, **variables)).stdout.split())

    bare = loaded(modules, DIFFUSERS_QUANTFIX_AUTO="0")
    assert loaded(modules, DIFFUSERS_QUANTFIX_AUTO="1") == bare - {"diffusers_quantfix_startup.enabled"}
    assert loaded(asked, DIFFUSERS_QUANTFIX_AUTO="1") - bare - {"__future__"} == WITH_A_LIBRARY
    assert loaded(asked) == bare - {"diffusers_quantfix_startup.enabled"}, (
        "without a choice only the file itself"
    )
    assert "diffusers_quantfix_startup" in bare


def test_the_search_that_wakes_it_asks_every_other_finder(environment: Environment):
    """A finder that came before it, one that came after it, and the path: none is left out, once and again."""
    fake = environment.folder / "transformers.py"
    fake.write_text("here = True\n")
    program = """
import transformers
assert transformers.here and "diffusers_quantfix" in sys.modules
print(*(finder for finder, name in asked if name == "transformers"))
try:
    import diffusers
except ModuleNotFoundError:
    print(*(finder for finder, name in asked if name == "diffusers"))
"""
    try:
        done = checked(environment.run("-c", FINDERS + program, DIFFUSERS_QUANTFIX_AUTO="1"))
    finally:
        fake.unlink()  # other tests share the environment
    assert done.stdout.split() == ["before", "after"] * 2


def test_a_typo_in_the_settings_is_reported_with_the_first_library(environment: Environment):
    """And not by every other program of the environment."""
    done = checked(environment.run("-c", "1", DIFFUSERS_QUANTFIX_AUTO="1", DIFFUSERS_QUANTFIX="of"))
    assert done.stderr == ""
    done = checked(environment.run("-c", ASK, DIFFUSERS_QUANTFIX_AUTO="1", DIFFUSERS_QUANTFIX="of"))
    assert done.stderr.count("DIFFUSERS_QUANTFIX") == 1 and "'of'" in done.stderr


def test_other_modules_do_not_wake_it(environment: Environment):
    """Not those either whose names are parts of a library's, or begin with one."""
    program = (
        "import importlib.util as u, sys\n"
        "for name in ('torch', 'fsdp', 'diff', 'a', 'transformers_x', 'peft optimum'): u.find_spec(name)\n"
        "print('diffusers_quantfix' in sys.modules)\n"
    )
    done = environment.run("-c", program, DIFFUSERS_QUANTFIX_AUTO="1")
    assert (done.stdout.strip(), done.stderr) == ("False", "")


@pytest.mark.parametrize("way", ["import diffusers_quantfix", "pass"])
def test_a_finder_that_waits_is_one_like_others(environment: Environment, way: str):
    """What programs do with every finder: it is asked for distributions and to forget, listed, copied and pickled."""
    program = f"""
{way}
import copy, importlib, importlib.metadata, pickle, pkgutil, sys
found = [finder for finder in sys.meta_path if getattr(finder, "__module__", "").startswith("diffusers_quantfix")]
assert len(found) == 1, sys.meta_path
importlib.invalidate_caches()
assert "diffusers-quantfix" in [one.metadata["Name"] for one in importlib.metadata.distributions()]
assert copy.deepcopy(found) == copy.copy(found) == pickle.loads(pickle.dumps(found)) == found
print([finder.__name__ for finder in found], repr(found[0])[:9], type(found[0]).__name__)
for finder in sys.meta_path:
    assert finder.find_spec("nowhere") is finder.find_spec("nowhere", None, None) is None
assert "typing" in sys.modules and [*pkgutil.iter_modules()]
import importlib.util
print(importlib.util.find_spec("diffusers"), "diffusers_quantfix.activation" in sys.modules)
"""
    done = checked(environment.run("-c", program, DIFFUSERS_QUANTFIX_AUTO="0" if "import" in way else "1"))
    assert done.stdout.splitlines()[-1] == "None True", done.stdout


def test_an_orphaned_start_up_file_says_nothing(own_environment: Environment):
    checked(own_environment.run("-m", "diffusers_quantfix", "enable"))
    for folder in ("diffusers_quantfix", "diffusers_quantfix_startup"):
        shutil.rmtree(own_environment.site / folder)
        done = own_environment.run(
            "-c", "import importlib.util as u; u.find_spec('diffusers'); print('started')"
        )
        assert (done.stdout.strip(), done.stderr) == ("started", "")


def test_a_choice_that_cannot_be_written_is_one_sentence(own_environment: Environment):
    choice = own_environment.site / "diffusers_quantfix_startup" / "choice"
    choice.unlink()
    choice.mkdir()  # not even root can write this
    done = own_environment.run("-m", "diffusers_quantfix", "enable")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "cannot write" in done.stderr
    assert "set DIFFUSERS_QUANTFIX_AUTO=1 in the environment instead" in done.stderr
    assert not active(own_environment)
    assert active(own_environment, DIFFUSERS_QUANTFIX_AUTO="1"), "what was advised"


def test_half_removed_start_up_files_say_nothing(own_environment: Environment):
    folder = own_environment.site / "diffusers_quantfix_startup"
    for name in ("choice", "enabled.py", "__init__.py"):
        (folder / name).unlink()
        for variables in ({}, {"DIFFUSERS_QUANTFIX_AUTO": "1"}, {"DIFFUSERS_QUANTFIX_AUTO": "ja"}):
            done = own_environment.run("-c", ASK, **variables)
            works = name == "choice" and variables.get("DIFFUSERS_QUANTFIX_AUTO") == "1"
            said = done.stderr and name == "choice" and "ja" in variables.values()
            assert done.stdout.strip() == str(works)
            assert bool(done.stderr) == bool(said), done.stderr


def test_a_damaged_choice_is_none(own_environment: Environment):
    """Every start of the interpreter printed a traceback, and `enable` ended in one."""
    (own_environment.site / "diffusers_quantfix_startup" / "choice").write_bytes(b"\xff\xfe" * 100)
    done = checked(own_environment.run("-c", ASK))
    assert (done.stdout.strip(), done.stderr) == ("False", "")
    done = checked(own_environment.run("-m", "diffusers_quantfix", "enable"))
    assert not done.stderr
    assert active(own_environment)


def test_two_choices_at_the_same_time(tmp_path, monkeypatch):
    """Each is written whole, whoever comes last: one may not take away the file that the other writes."""
    startup = types.ModuleType(command.MODULE)
    startup.CHOICE = str(tmp_path / "choice")
    monkeypatch.setitem(sys.modules, command.MODULE, startup)
    move, own = os.replace, os.getpid()
    inside = []

    def replace(old, new):
        if not inside:
            inside.append(True)
            monkeypatch.setattr(os, "getpid", lambda: own + 1)
            inside.append(command.write_choice("on"))
        move(old, new)

    monkeypatch.setattr(os, "replace", replace)
    assert command.write_choice("") == ""
    assert inside == [True, ""]
    assert command.read_choice() == ""
    assert os.listdir(tmp_path) == ["choice"]


def test_enable_and_disable_at_the_same_time(environment: Environment):
    """Some of the pairs ended with "does not run the start-up file" and 2."""
    for _ in range(8):
        pair = [
            subprocess.Popen(
                [environment.python, "-m", "diffusers_quantfix", word], cwd=environment.folder, env={}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for word in ("enable", "disable")
        ]  # fmt: skip
        said = [process.communicate(timeout=120) for process in pair]
        assert [process.returncode for process in pair] == [0, 0], said
        assert all(error == "" and out.startswith("activation: ") for out, error in said), said


def test_disabled_while_enable_checks(environment: Environment):
    """The same without chance: `disable` comes between the writing and the look."""
    program = """
        import sys
        from diffusers_quantfix.commands import enable, startup
        look = enable._is_active_in_a_fresh_interpreter
        def late(variables):
            startup.write_choice("")
            return look(variables)
        enable._is_active_in_a_fresh_interpreter = late
        sys.exit(enable.run(None))
    """
    done = checked(environment.run("-c", textwrap.dedent(program)))
    assert "only where it is imported" in done.stdout and "another command has changed it" in done.stdout
    assert not active(environment)


@pytest.mark.skipif(os.name == "nt", reason="files have no mode there")
def test_the_choice_keeps_its_mode(environment: Environment):
    """With umask 077, usual for root, only root could read it, and nobody else was activated."""
    choice = environment.site / "diffusers_quantfix_startup" / "choice"
    mode = choice.stat().st_mode & 0o777
    assert mode & 0o044 == 0o044
    program = "import os, sys; os.umask(0o077); from diffusers_quantfix.__main__ import main; sys.exit(main([WORD]))"
    for word in ("enable", "disable"):
        checked(environment.run("-c", program.replace("WORD", repr(word))))
        assert choice.stat().st_mode & 0o777 == mode
        assert active(environment) == (word == "enable")


@pytest.fixture
def base(tmp_path) -> Environment:
    """An installation of Python of its own: the base one, with other packages."""
    source = pathlib.Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    made = Environment(tmp_path / "base")
    made.python.parent.mkdir(parents=True)
    shutil.copy2(source, made.python)
    for name in ("lib", "lib64"):
        for path in (source.parents[1] / name).glob("*") if (source.parents[1] / name).is_dir() else ():
            (made.folder / name).mkdir(exist_ok=True)
            if path.name != f"python{sys.version_info[0]}.{sys.version_info[1]}":
                (made.folder / name / path.name).symlink_to(path)
                continue
            library = made.folder / name / path.name
            library.mkdir()
            for module in path.iterdir():
                if module.name != "site-packages":
                    (library / module.name).symlink_to(module)
            (library / "site-packages").mkdir()
    prefix = made.run("-c", "import sys; print(sys.base_prefix)").stdout.strip()
    if prefix != str(made.folder):
        pytest.skip(f"a copy of {source} is not an installation of its own")
    return made


def test_an_environment_that_uses_the_packages_of_another(
    base: Environment, environment: Environment, tmp_path
):
    """`enable` there wrote the choice of the installation, and named the environment."""
    for path in environment.site.iterdir():
        place = base.site / path.name
        if not path.is_symlink() and path.is_dir():
            shutil.copytree(path, place, symlinks=True)
        else:
            shutil.copy2(path, place, follow_symlinks=False)
    checked(base.run("-m", "venv", "--without-pip", "--system-site-packages", tmp_path / "child"))
    child = Environment(tmp_path / "child")
    assert active(child) is active(base) is False
    said = checked(child.run("-m", "diffusers_quantfix", "enable")).stdout
    assert (
        f"at every start of the Python installation {base.folder}," in said and str(child.folder) not in said
    )
    assert active(child) is active(base) is True
    said = checked(child.run("-m", "diffusers_quantfix", "status")).stdout
    assert str(base.folder) in said
    checked(child.run("-m", "diffusers_quantfix", "disable"))
    assert active(child) is active(base) is False


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
    queue.put(ACTIVE)
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
    text = CHILDREN[way].replace("CODE", repr(ASK)).replace("CHILD", "main()")
    program = environment.folder / "program.py"
    program.write_text(PROGRAM.replace("ACTIVE", ACTIVE) + f"if __name__ == '__main__':\n    {text}\n")
    done = checked(environment.run(program, DIFFUSERS_QUANTFIX_AUTO="1"))
    assert done.stdout.strip() == "True"
    assert checked(environment.run(program)).stdout.strip() == "False"


def test_sitecustomize_can_import_it(own_environment: Environment):
    (own_environment.site / "sitecustomize.py").write_text("import diffusers_quantfix\n")
    assert active(own_environment)
    assert active(own_environment, DIFFUSERS_QUANTFIX_AUTO="1"), "both ways at once"


IMPORTED_ELSEWHERE = """
import importlib.util, sys, threading, time, typing  # with typing, the package imports a module of its own at once
reached = threading.Event()
def slow(event, args):
    if event == "exec" and threading.current_thread() is importing and "_quantfix/__init__" in args[0].co_filename:
        reached.set()
        time.sleep(0.3)
sys.addaudithook(slow)
def work():
    import diffusers_quantfix
importing = threading.Thread(target=work, daemon=True)
importing.start()
assert reached.wait(10)
importlib.util.find_spec("accelerate")
importing.join(20)
print(importing.is_alive())
importlib.util.find_spec("diffusers")
print("diffusers_quantfix.activation" in sys.modules)
"""


def test_a_library_imported_while_another_thread_imports_the_package(environment: Environment):
    """Each waited for the other: for the package, and for the lock that is held while finders are asked."""
    done = environment.run("-X", "faulthandler", "-c", IMPORTED_ELSEWHERE, DIFFUSERS_QUANTFIX_AUTO="1")
    assert done.stdout.split() == ["False", "True"], done.stderr


INTERRUPTED = """
import importlib.util, sys
interrupted = []
def interrupt(event, args):
    if event == "exec" and "diffusers_quantfix/__init__" in args[0].co_filename and not interrupted:
        interrupted.append(True)
        raise KeyboardInterrupt
sys.addaudithook(interrupt)
try:
    importlib.util.find_spec("accelerate")
except KeyboardInterrupt:
    importlib.util.find_spec("accelerate")
print(interrupted, "diffusers_quantfix.activation" in sys.modules)
"""


def test_an_interrupted_activation_is_done_by_the_next_import(environment: Environment):
    done = environment.run("-c", INTERRUPTED, DIFFUSERS_QUANTFIX_AUTO="1")
    assert done.stdout.strip() == "[True] True", done.stderr
