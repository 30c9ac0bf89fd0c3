"""A program that vendors the package, beside an installed one: only one of the two patches."""

from __future__ import annotations

import shutil

import pytest

from tests.engine.conftest import simple, world  # noqa: F401  # fixtures
from tests.engine.harness import ROOT

OURS = "diffusers_quantfix"
NAMES = ["their_diffusers_quantfix", "app.vendor.diffusers_quantfix"]

CALLS = """
import importlib, sys
def look():
    import lib.core
    f, calls = lib.core.f, 0
    while hasattr(f, "__wrapped__") or f.__closure__:  # once for each patch
        f, calls = getattr(f, "__wrapped__", None) or f.__closure__[0].cell_contents, calls + 1
    return lib.core.f(), calls
def state(module):
    answer = sys.modules[module].status(load=False)["fix-f"]
    return answer.state, answer.reason
"""


@pytest.fixture
def vendored(simple, request):  # noqa: F811
    """The world, with a copy of the package under that name."""
    *parents, name = request.param.split(".")
    home = simple.site.joinpath(*parents)
    home.mkdir(parents=True, exist_ok=True)
    left_out = shutil.ignore_patterns("fixes", "__pycache__", "*.json", "*.md")
    copy = shutil.copytree(ROOT / OURS, home / name, ignore=left_out)
    (copy / "fixes").symlink_to(simple.fixes)
    shutil.copy(ROOT / OURS / "fixes" / "__init__.py", simple.fixes)
    fix = simple.fixes / "fix_f.py"
    fix.write_text(fix.read_text().replace(f"from {OURS}.", "from .."))  # each its own, as the real ones
    return simple, request.param


@pytest.mark.parametrize("order", ["ours first", "theirs first"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("vendored", NAMES, indirect=True)
def test_beside_the_installed_one(vendored, order, late) -> None:
    """Before: each patched what the other had patched; a nested one ended in an AttributeError."""
    world, theirs = vendored  # noqa: F811
    first, second = (OURS, theirs) if order == "ours first" else (theirs, OURS)
    between = "import lib.core" if late else ""
    outcome = world.run(
        f"{CALLS}import {first}\n{between}\nimport {second}\nfound = [look(), state({second!r}), look()]\n"
        f"sys.modules[{first!r}].apply()\n"
        f"back = [look(), state({first!r}), state({second!r})]\n"
        f"sys.modules[{first!r}].revert()\n"
        f"sys.modules[{second!r}].revert()\n"
        "tell(found=found, back=back, reverted=look())\n"
    )
    applied = ["applied", "patched here (lib 1.0)"]
    replaced = ["disabled", "another copy of this package replaced this one; apply() replaces that one"]
    assert outcome["found"] == [["patched", 1], applied, ["patched", 1]]
    assert outcome["back"] == [["patched", 1], applied, replaced]
    assert outcome["reverted"] == ["broken", 0]
    assert not outcome.err


@pytest.mark.parametrize("vendored", NAMES, indirect=True)
def test_alone(vendored) -> None:
    world, theirs = vendored  # noqa: F811
    outcome = world.run(
        f"{CALLS}import {theirs}\nfound = [look(), state({theirs!r})]\n"
        f"sys.modules[{theirs!r}].revert()\ntell(found=found, reverted=look())\n"
    )
    assert outcome.told == {
        "found": [["patched", 1], ["applied", "patched here (lib 1.0)"]],
        "reverted": ["broken", 0],
    }
    assert not outcome.err


@pytest.mark.parametrize("settings", ["", "claimed"], ids=["waiting", "watching"])
@pytest.mark.parametrize("vendored", NAMES[:1], indirect=True)
def test_status_of_the_replaced_one(vendored, settings) -> None:
    """A first copy that had patched nothing yet took over from the second one as soon as its status was asked."""
    world, theirs = vendored  # noqa: F811
    outcome = world.run(
        f"{CALLS}import {theirs}\nimport {OURS}\nimport lib.core\n"
        f"told = [state({theirs!r}), state({OURS!r}), look()]\n"
        f"sys.modules[{theirs!r}].apply()\n"
        f"tell(told=told, back=[state({theirs!r}), state({OURS!r}), look()])\n",
        settings,
    )
    applied = ["applied", "patched here (lib 1.0)"]
    replaced = ["disabled", "another copy of this package replaced this one; apply() replaces that one"]
    assert outcome.told == {
        "told": [replaced, applied, ["patched", 1]],
        "back": [applied, replaced, ["patched", 1]],
    }
    assert not outcome.err
