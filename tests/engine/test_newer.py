"""A release above the claims: one warning, the exit code, and what `newer` may and may not do."""

from __future__ import annotations

import pytest

FACTS = """
    import {order}
    import logging
    board = diffusers_quantfix.status()
    answer = board["fix-f"]
    tell(state=answer.state, reason=answer.reason, ok=board.ok, f=lib.core.f(), changes=answer.changes,
         above=answer.above, table=str(board), candidates=[a.id for a in board.candidates])
"""
ORDERS = ["diffusers_quantfix, lib.core", "lib.core, diffusers_quantfix"]
APPLIED = "applied (unclaimed release)"


@pytest.mark.parametrize("order", ORDERS)
def test_a_new_release_is_warned_of_once_and_is_not_ok(world, order) -> None:
    world.library(version="3.0.dev0")
    world.fix(claims={"lib": ">=1,<=2.1"})
    world.fix("fix-g", claims={"lib": ">=1,<=2.1"})
    outcome = world.run(FACTS.format(order=order))
    assert (outcome["state"], outcome["ok"], outcome["above"]) == ("candidate", False, True)
    assert (outcome["f"], outcome["changes"]) == ("broken", [])
    assert "DIFFUSERS_QUANTFIX=newer:fix-f" in outcome["reason"]
    assert outcome.err.count("newer than this version") == 1
    assert "DIFFUSERS_QUANTFIX=newer" in outcome.err
    head = outcome["table"].partition("\n-> ")[0]
    assert (
        head.index("2 candidate") < head.index("candidate: fix-f, fix-g") < head.index("newer:<id> for one")
    )


def test_two_threads_warn_once(world) -> None:
    """Both read that nobody had warned before either had written it."""
    world.library(version="3.0.dev0")
    world.fix(claims={"lib": ">=1,<=2.1"})
    outcome = world.run("""
        import threading, diffusers_quantfix as qf, lib.core
        from diffusers_quantfix.process_runner import RUNNER as runner
        from diffusers_quantfix.engine import runner as module
        RUNS = []
        class Slow(type(runner)):
            @property
            def _warned(self):
                before = self.__dict__["said"]
                if threading.current_thread() is not threading.main_thread() and not before:
                    threading.Event().wait(0.2)
                return before
            @_warned.setter
            def _warned(self, value):
                self.__dict__["said"] = value
        runner.__dict__["said"] = runner.__dict__.pop("_warned") and False
        runner.__class__ = Slow
        threads = [threading.Thread(target=runner._warn_of_candidates) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        tell()
    """)
    assert outcome.err.count("newer than this version") == 2  # at the import, and by one of the threads


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("settings", ["newer", "newer:fix-f", "newer:fix-g,newer:fix-f"])
def test_newer_patches_above_the_range(world, order, settings) -> None:
    world.library(version="3.0")
    world.fix(claims={"lib": ">=1,<=2.1"})
    world.fix("fix-g", claims={"lib": "<1"}, body="def broken(m): return False\ndef patch(m, draft): pass")
    outcome = world.run(FACTS.format(order=order), settings)
    assert (outcome["state"], outcome["ok"], outcome["f"]) == (APPLIED, True, "patched")
    assert outcome["changes"] == ["lib.core.f"]
    assert "although lib 3.0 is outside" in outcome["reason"]
    assert not outcome.err


def test_newer_of_one_fix_leaves_the_others(world) -> None:
    world.library(version="3.0")
    world.fix(claims={"lib": "<2"})
    world.fix("fix-g", claims={"lib": "<2"})
    outcome = world.run(
        "import diffusers_quantfix, lib.core; tell(s=states('fix-f', 'fix-g'))", "newer:fix-g"
    )
    assert outcome["s"] == ["candidate", APPLIED]


@pytest.mark.parametrize(
    ("version", "claims"),
    [
        pytest.param("0.5", {"lib": ">=1,<2"}, id="below"),
        pytest.param("1.5", {"lib": ">=1,!=1.5"}, id="gap"),
        pytest.param("1.5", {"lib": ">=1,!=1.5,<3"}, id="gap with an end"),
        pytest.param("3.0", {"lib": "<2", "friend": ">=2"}, id="one above, one below"),
    ],
)
def test_newer_never_reaches_below_a_range_or_into_a_gap(world, version, claims) -> None:
    world.library(version=version)
    world.distribution("friend", "1.0")
    world.fix(claims=claims)
    outcome = world.run(FACTS.format(order=ORDERS[0]), "newer")
    assert (outcome["state"], outcome["f"], outcome["above"]) == ("candidate", "broken", False)
    assert "please report it" in outcome["reason"]
    assert outcome["ok"]
    assert not outcome.err


def test_newer_leaves_a_healthy_release_and_a_patch_that_does_not_help(world) -> None:
    world.library(version="3.0")
    world.fix(body="def broken(m): return False\ndef patch(m, draft): draft.replace(m, 'f', None)")
    world.fix(
        "fix-g", body="def broken(m): return True\ndef patch(m, draft): draft.replace(m, 'f', lambda: 'g')"
    )
    outcome = world.run(
        "import diffusers_quantfix, lib.core; tell(s=states('fix-f', 'fix-g'), f=lib.core.f(), why=reason('fix-g'))",
        "newer",
    )
    assert outcome["s"] == ["out-of-range", "failed"]
    assert outcome["f"] == "broken"
    assert "the defect is still there after patching" in outcome["why"]


def test_a_mistyped_id_after_newer_is_said(world) -> None:
    world.library()
    world.fix()
    outcome = world.run("import diffusers_quantfix, lib.core; tell(s=states('fix-f'))", "newer:fix-ff")
    assert outcome["s"] == "applied"
    assert "newer:fix-ff names no fix; did you mean fix-f?" in outcome.err


def test_revert_and_apply_of_a_newer_fix(world) -> None:
    world.library(version="3.0")
    world.fix()
    outcome = world.run(
        """
        import diffusers_quantfix as qf, lib.core
        first = states("fix-f")
        qf.revert()
        tell(first=first, off=(states("fix-f"), lib.core.f()), again=qf.apply()["fix-f"].state, f=lib.core.f())
        """,
        "newer",
    )
    assert outcome.told == {"first": APPLIED, "off": ["disabled", "broken"], "again": APPLIED, "f": "patched"}


@pytest.mark.parametrize("order", ["pasted, diffusers_quantfix", "diffusers_quantfix, pasted"])
def test_a_foreign_patch_that_makes_the_probe_healthy_is_not_upstreams(world, order) -> None:
    """It was credited to upstream: "the defect is not there"."""
    world.library()
    (world.site / "pasted.py").write_text(
        "import lib.core\ndef better(x=0): return 'fine'\nlib.core.f = better\n"
    )
    world.fix()
    outcome = world.run(f"""
        import {order}, lib.core
        diffusers_quantfix.apply()
        board = diffusers_quantfix.status()
        tell(state=board["fix-f"].state, reason=board["fix-f"].reason, f=lib.core.f())
    """)
    assert outcome["f"] == "fine"
    assert "pasted" in outcome["reason"], outcome["reason"]
