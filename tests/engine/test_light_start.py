"""What an interpreter pays for activation: the package's own few modules, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .harness import ROOT

OURS = {"diffusers_quantfix"}
WITH_A_LIBRARY = OURS | {
    "diffusers_quantfix.first_library",
    "diffusers_quantfix.forked",
    "diffusers_quantfix.activation",
    "diffusers_quantfix.engine",
    "diffusers_quantfix.engine.settings",
    "diffusers_quantfix.engine.watcher",
    "diffusers_quantfix.fixes",
    "diffusers_quantfix.fixes.index",
    "diffusers_quantfix.user_settings",
}
HEAVY = {"torch", "wrapt", "packaging", "importlib.metadata", "logging", "dataclasses", "typing", "re"}

# `site`, without which nobody runs, has always loaded `os`.
BARE = """
import os, sys
sys.path.insert(0, {root!r})
before = set(sys.modules)
import diffusers_quantfix
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("options", [("-S",), ("-S", "-I"), ("-S", "-OO")], ids=" ".join)
def test_import_adds_exactly_its_own_modules(options) -> None:
    # "-S": what `site` loads by itself, and path files of this environment, would hide what we load.
    done = subprocess.run(
        [sys.executable, *options, "-c", BARE.format(root=str(ROOT))],
        capture_output=True,
        text=True,
        check=True,
    )
    added = set(done.stdout.split())
    # `__future__` holds a name and no code; every module that delays its annotations has it.
    assert added - {"__future__"} == OURS
    assert not done.stderr


def test_asking_for_a_library_loads_nothing_of_ours_or_of_theirs(simple) -> None:
    outcome = simple.run("""
        import importlib.util, sys
        before = set(sys.modules)
        import diffusers_quantfix
        for name in ("lib", "lib", "absent"):
            importlib.util.find_spec(name)
        added = set(sys.modules) - before
        importlib.util.find_spec("lib.core")  # imports the parent, as it always did
        later = set(sys.modules) - before
        tell(added=sorted(added), later=sorted(later))
    """)
    fake = {"diffusers_quantfix.fixes"}  # is there from the beginning
    assert set(outcome["added"]) - {"__future__"} == WITH_A_LIBRARY - fake
    assert set(outcome["later"]) - set(outcome["added"]) == {"lib"}


def test_the_engine_comes_with_the_first_target(simple) -> None:
    simple.fix("fix-late", target="lib.late")
    outcome = simple.run("""
        import sys
        import diffusers_quantfix, lib
        tell(before=[name for name in sys.modules if name.startswith("diffusers_quantfix.engine.")])
        import lib.core
        tell(after=sorted(name for name in sys.modules if name.startswith("diffusers_quantfix.")),
             late="lib.late" in sys.modules)
    """)
    assert len(outcome["before"]) == 2
    assert "diffusers_quantfix.engine.runner" in outcome["after"]
    assert "diffusers_quantfix.fixes.fix_late" not in outcome["after"], (
        "the file of a fix that nobody needs yet"
    )
    assert not outcome["late"]


@pytest.mark.parametrize("settings", ["", "off"])
def test_nothing_heavy_even_when_other_modules_arrive(simple, settings) -> None:
    outcome = simple.run(
        """
        import sys
        before = set(sys.modules)
        import diffusers_quantfix, lib, colorsys
        tell(added=sorted(set(sys.modules) - before))
    """,
        settings,
        options=("-S", "-X", "frozen_modules=on"),
    )
    assert not HEAVY & set(outcome["added"])
