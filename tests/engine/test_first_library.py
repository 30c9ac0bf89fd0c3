"""What waits for the first of the libraries: one small module, until one is asked for."""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from pathlib import Path

import pytest

import diffusers_quantfix
from diffusers_quantfix.fixes.targets import TARGETS

from .harness import FINDERS, ROOT


def test_it_waits_for_every_library_that_is_patched() -> None:
    """A library that is a target itself would come too early: the search that wakes us is under way.

    Not for torch: a program without any of the others has no quantized model, and its start shall cost nothing. Only
    for the modules of it that are patched, of which `tests/startup/test_of_torch.py` sees that torch imports none.
    """
    targets = {target.module for target in TARGETS.values()}
    of_torch = {target for target in targets if target.partition(".")[0] == "torch"}
    libraries = {target.partition(".")[0] for target in targets} - {"torch"}
    assert of_torch | libraries == diffusers_quantfix._WAITED_FOR
    assert not targets & libraries


def test_the_start_up_file_waits_for_the_same_names() -> None:
    """It has them itself: it is installed beside the package, and every start of the interpreter pays for it."""
    source = (ROOT / "diffusers_quantfix" / "startup" / "run.py").read_text(encoding="utf-8")
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "NAMES"
    )
    assert set(names.split()) == diffusers_quantfix._WAITED_FOR


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_every_library_imports_typing(library) -> None:
    """Where it is not there, none of them is: the start-up file looks no further. All others import torch."""
    spec = importlib.util.find_spec(library)
    if spec is None:
        pytest.skip(f"{library} is not installed")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    assert any(isinstance(node, ast.ImportFrom) and node.module == "typing" for node in tree.body) or any(
        isinstance(node, ast.Import) and node.names[0].name == "typing" for node in tree.body
    )


@pytest.mark.parametrize("before", ["", "import typing", "import lib.core"])
def test_it_patches_before_and_after(simple, before) -> None:
    outcome = simple.run(f"{before}\nimport diffusers_quantfix, lib.core\ntell(f=lib.core.f())")
    assert outcome["f"] == "patched"


@pytest.mark.parametrize(
    "again", ["importlib.reload(diffusers_quantfix)", "del sys.modules['diffusers_quantfix']"]
)
def test_a_second_copy_takes_the_place_of_the_first(simple, again) -> None:
    outcome = simple.run(f"""
        import importlib, sys
        import diffusers_quantfix
        number = len(sys.meta_path)
        {again}
        import diffusers_quantfix
        added = len(sys.meta_path) - number
        import lib.core
        diffusers_quantfix.revert()
        tell(added=added, left=len(sys.meta_path) - number, f=lib.core.f())
    """)
    assert outcome.told == {"added": 0, "left": -1, "f": "broken"}


def test_the_package_is_deleted_while_it_waits(simple) -> None:
    """An upgrade in a notebook: the library that comes then is as it was."""
    outcome = simple.run("""
        import sys
        import diffusers_quantfix
        sys.modules["diffusers_quantfix.first_library"] = None  # its file is gone
        import lib.core
        tell(f=lib.core.f())
    """)
    assert (outcome["f"], outcome.err) == ("broken", "")


def test_other_modules_do_not_wake_it(simple) -> None:
    outcome = simple.run("""
        import sys
        import diffusers_quantfix, colorsys, importlib.util
        importlib.util.find_spec("nowhere")
        before = "diffusers_quantfix.activation" in sys.modules
        import lib
        tell(before=before, after="diffusers_quantfix.activation" in sys.modules)
    """)
    assert outcome.told == {"before": False, "after": True}


def test_the_watcher_comes_into_its_place(simple) -> None:
    """No finder is left out of the search that wakes it, and a program's ``pop(0)`` takes what it has put there."""
    script = """
        number = len(sys.meta_path)
        import lib.core
        first = sys.meta_path.pop(0).name
        tell(asked=asked, first=first, number=len(sys.meta_path) + 1 - number, f=lib.core.f(),
             names=[type(finder).__name__ for finder in sys.meta_path[:2]])
    """
    outcome = simple.run("import diffusers_quantfix\n" + FINDERS + textwrap.dedent(script))
    asked = [who for who, name in outcome["asked"] if name == "lib"]
    assert asked == ["before", "after"]
    assert (outcome["first"], outcome["number"], outcome["f"]) == ("before", 0, "patched")
    assert outcome["names"] == ["Watcher", "Finder"]


@pytest.mark.parametrize(
    ("settings", "state"), [("", "waiting"), ("off", "disabled"), ("skip:fix-f", "disabled")]
)
def test_status_before_any_library(simple, settings, state) -> None:
    outcome = simple.run(
        """
        import diffusers_quantfix as qf
        before = states("fix-f")
        import lib.core
        tell(before=before, after=states("fix-f"), f=lib.core.f())
    """,
        settings,
    )
    healthy = state == "waiting"
    assert outcome["before"] == state
    assert (outcome["after"], outcome["f"]) == (("applied", "patched") if healthy else ("disabled", "broken"))


def test_revert_before_any_library_and_apply_again(simple) -> None:
    outcome = simple.run("""
        import sys
        import diffusers_quantfix as qf
        number = len(sys.meta_path)
        qf.revert()
        left = number - len(sys.meta_path)
        import lib.core
        before = lib.core.f()
        qf.apply()
        tell(left=left, before=before, after=lib.core.f())
    """)
    assert outcome.told == {"left": 1, "before": "broken", "after": "patched"}


@pytest.mark.parametrize("settings", ["", "strict"])
def test_a_fault_of_ours_breaks_no_import(simple, settings) -> None:
    outcome = simple.run(
        f"""
        import os, sys
        import diffusers_quantfix
        os.environ["DIFFUSERS_QUANTFIX"] = {settings!r}
        sys.modules["diffusers_quantfix.activation"] = None  # a broken installation
        try:
            import lib.core
            said = lib.core.f()
        except ImportError:
            said = "raised"
        tell(said=said)
    """
    )
    assert outcome["said"] == ("raised" if settings else "broken")
    assert settings or outcome.err.count("activation failed, no fixes applied") == 1


def test_threads_that_ask_for_libraries_at_once(simple) -> None:
    simple.library("lib2")
    simple.fix("fix-2", target="lib2.core", claims={"lib2": "<2"})
    outcome = simple.run("""
        import sys, threading, importlib
        sys.setswitchinterval(1e-6)
        import diffusers_quantfix
        gate = threading.Barrier(2)
        def work(name):
            gate.wait()
            importlib.import_module(name)
        threads = [threading.Thread(target=work, args=(name,)) for name in ("lib.core", "lib2.core")]
        for thread in threads: thread.start()
        for thread in threads: thread.join(20)
        import lib.core, lib2.core
        tell(values=[lib.core.f(), lib2.core.f()])
    """)
    assert outcome["values"] == ["patched", "patched"]


def test_an_interrupted_activation_is_done_by_the_next_import(world) -> None:
    """Ctrl-C in a notebook while the first library is imported: the process stayed without any fix."""
    world.library()
    world.fix()
    outcome = world.run("""
        import sys, diffusers_quantfix
        interrupted = []
        def interrupt(event, args):
            if event == "exec" and "user_settings" in args[0].co_filename and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
        sys.addaudithook(interrupt)
        try:
            import lib.core
        except KeyboardInterrupt:
            import lib.core
        tell(f=lib.core.f(), state=states("fix-f"), interrupted=interrupted)
    """)
    assert outcome.told == {"f": "patched", "state": "applied", "interrupted": [True]}
