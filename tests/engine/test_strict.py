"""``strict``: where the package would leave the library as it was, it raises; a report still answers."""

from __future__ import annotations

import pytest

from .harness import PATCH, PROBE

RAISES = "def broken(m): raise ValueError('odd')\ndef patch(m, ledger): pass"


@pytest.fixture
def strict(simple):
    """A fix that fails before a good one, and a target without faults."""
    simple.fix("a-bad", body=RAISES)
    simple.targets = dict(sorted(simple.targets.items()))
    (simple.site / "lib" / "second.py").write_text("def f(): return 'broken'\n")
    simple.fix("good-second", target="lib.second", body=PROBE + PATCH)
    return simple


def test_the_import_of_the_target_raises_and_the_other_fixes_are_installed(strict) -> None:
    outcome = strict.run(
        """
        import sys, diffusers_quantfix as qf
        from diffusers_quantfix.engine.runner import StrictError
        faults = []
        for _ in range(2):
            try:
                import lib.core
            except StrictError as error:
                faults.append(str(error))
        import lib.second
        tell(faults=faults, there="lib.core" in sys.modules, second=lib.second.f(),
             states=[answer.state for answer in qf.status()])
    """,
        "strict",
    )
    assert outcome["faults"] == ["a-bad: its probe failed: ValueError: odd"] * 2
    assert outcome["there"] is False
    assert outcome["second"] == "patched"
    assert outcome["states"] == ["failed", "applied", "applied"]


def test_importing_us_raises_when_the_target_is_there(strict) -> None:
    outcome = strict.run(
        """
        import lib.core
        try:
            import diffusers_quantfix
        except RuntimeError as error:
            said = type(error).__name__, str(error)
        import diffusers_quantfix as qf
        tell(said=said, f=lib.core.f(), state=qf.status()["a-bad"].state)
    """,
        "strict",
    )
    assert outcome.told == {
        "said": ["StrictError", "a-bad: its probe failed: ValueError: odd"],
        "f": "patched",
        "state": "failed",
    }


def test_apply_raises_and_status_answers(strict) -> None:
    outcome = strict.run(
        """
        import diffusers_quantfix as qf
        board = qf.status()
        loaded, states = board.loaded, [answer.state for answer in board]
        try:
            qf.apply()
        except RuntimeError as error:
            said = str(error)
        good = qf.apply("fix-f")["fix-f"].state
        tell(loaded=loaded, states=states, said=said, good=good, reverted=qf.revert().ok)
    """,
        "strict",
    )
    assert outcome["loaded"] == ["lib.core", "lib.second"]
    assert outcome["states"] == ["failed", "applied", "applied"]
    assert "a-bad: its probe failed" in outcome["said"]
    assert outcome["good"] == "applied"


def test_a_report_in_one_thread_does_not_hush_an_import_in_another(strict) -> None:
    (strict.site / "lib" / "slow.py").write_text(
        "import sys\nsys.entered.set()\nsys.leave.wait(10)\ndef f(): return 'broken'\n"
    )
    strict.fix("slow", target="lib.slow")
    strict.targets = {"slow": strict.targets["slow"], **strict.targets}
    outcome = strict.run(
        """
        import sys, threading, diffusers_quantfix as qf
        sys.entered, sys.leave = threading.Event(), threading.Event()
        reporter = threading.Thread(target=qf.status)
        reporter.start()
        sys.entered.wait(10)
        try:
            import lib.core
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        sys.leave.set()
        reporter.join()
        tell(said=said)
    """,
        "strict",
    )
    assert "a-bad: its probe failed" in outcome["said"]


@pytest.mark.parametrize("state", ["missing", "out-of-range", "healthy", "disabled"])
def test_strict_is_about_faults_only(world, state) -> None:
    core = "def f(): return 'fine'" if state != "missing" else "pass"
    body = "from diffusers_quantfix.engine.probe import resolve\ndef broken(m): return resolve(m, 'f')() == 'broken'\n"
    world.library(core=core)
    world.fix(claims={"lib": "<1" if state == "out-of-range" else "<2"}, body=body + PATCH)
    settings = "strict,skip:fix-f" if state == "disabled" else "strict"
    outcome = world.run("import diffusers_quantfix, lib.core; tell(state=states('fix-f'))", settings)
    assert outcome["state"] == state
