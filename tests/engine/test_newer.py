"""A release above the claims: one warning, the exit code, and what `newer` may and may not do."""

from __future__ import annotations

import textwrap

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
        answers = [list(runner._answers.values())]
        threads = [threading.Thread(target=runner._warn_of_candidates, args=answers) for _ in range(2)]
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
    assert "the bug is still present after patching" in outcome["why"]


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
    """It was credited to upstream: "the bug is not present"."""
    world.library()
    (world.site / "pasted.py").write_text(
        "import lib.core\ndef better(x=0): return 'fine'\nlib.core.f = better\n"
    )
    world.fix()
    outcome = world.run(f"""
        import {order}, lib.core
        diffusers_quantfix.apply()
        board = diffusers_quantfix.status()
        again = diffusers_quantfix.status()["fix-f"].reason
        tell(state=board["fix-f"].state, reason=board["fix-f"].reason, f=lib.core.f(), again=again)
    """)
    assert outcome["f"] == "fine"
    assert outcome["reason"].count("pasted") == 1 and outcome["again"] == outcome["reason"]


PROVED = """
import json, sys
sys.path.insert(0, {site!r})
import lib.core, lib.packed
from diffusers_quantfix.engine.code_marks import Files, mark
from diffusers_quantfix.engine.same_code import find
names = {names!r}
with open({file!r}, "w") as file:
    json.dump(
        {{"releases": {{"lib": "2.1"}}, "pieces": {{n: mark(n, find(n), Files()) for n in names}},
         "targets": {{"fix-f": " ".join(map(str, range(len(names))))}}}}, file)
"""
HELPED = """
def helper():
    return "broken"

def f(x=0):
    "What f does."
    return helper()
"""
AFTER = FACTS + "\n    tell(same=answer.same_code, json=board.to_dict()['fixes'][0]['same_code'])"


def proved(world, core: str = HELPED, names: tuple[str, ...] = ("lib.core:f", "lib.core:helper")) -> None:
    """A library of release 3.0 with the code ``core``, whose fix was proved on `HELPED` in release 2.1."""
    import subprocess
    import sys

    from .harness import ROOT

    package = world.library(version="3.0", core=HELPED)
    (package / "packed.py").write_text("import lib.core\nclass Packed: pass\n")
    world.fix(claims={"lib": ">=1,<=2.1"})
    script = PROVED.format(site=str(world.site), names=names, file=str(world.fixes / "proved_code.json"))
    subprocess.run([sys.executable, "-B", "-c", script], check=True, cwd=ROOT)
    (package / "core.py").write_text(core)


@pytest.mark.parametrize("order", ORDERS)
def test_the_same_code_in_a_newer_release_is_patched(world, order) -> None:
    proved(world, HELPED.replace("What f does.", "Another text."))
    outcome = world.run(AFTER.format(order=order))
    assert (outcome["state"], outcome["ok"], outcome["f"]) == ("applied", True, "patched")
    assert (outcome["above"], outcome["same"], outcome["json"]) == (False, True, True)
    assert "lib 3.0 is outside >=1,<=2.1, but the code is the same as in lib 2.1" in outcome["reason"]
    assert not outcome.err


@pytest.mark.parametrize("order", ORDERS)
def test_changed_code_in_a_newer_release_is_not_patched_and_named(world, order) -> None:
    proved(world, HELPED.replace('return "broken"', 'return "bro" + "ken"'))
    outcome = world.run(AFTER.format(order=order))
    assert (outcome["state"], outcome["ok"], outcome["f"]) == ("candidate", False, "broken")
    assert (
        "not patched: since lib 2.1 lib.core:helper has changed; DIFFUSERS_QUANTFIX=newer"
        in outcome["reason"]
    )
    assert not outcome["same"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_function_that_was_renamed_has_moved(world, order) -> None:
    """Said by a report, which may take its time: an import only needs to know that it is gone."""
    proved(world, HELPED.replace("helper()", "_helper()"))
    outcome = world.run(AFTER.format(order=order))
    assert (outcome["state"], outcome["ok"], outcome["f"]) == ("candidate", False, "broken")
    said = "since lib 2.1 lib.core:f has changed, lib.core:helper has moved to lib.core:_helper; "
    assert said in outcome["reason"]


@pytest.mark.parametrize("order", ORDERS)
def test_the_patched_function_itself_has_moved(world, order) -> None:
    """The probe does not find it, but the bug is where it is now. If it has changed too, nobody knows."""
    proved(world, HELPED.replace("def f(", "def g("))
    from .harness import PATCH, PROBE

    finds = "from diffusers_quantfix.engine.probe import resolve\n" + PROBE.replace(
        "module.f()", 'resolve(module, "f")()'
    )
    world.fix(claims={"lib": ">=1,<=2.1"}, body=finds + PATCH)
    outcome = world.run(AFTER.format(order=order).replace("lib.core.f()", "lib.core.g()"))
    assert (outcome["state"], outcome["ok"], outcome["above"]) == ("candidate", False, True)
    assert "since lib 2.1 lib.core:f has moved to lib.core:g; please report it" in outcome["reason"]
    (world.site / "lib" / "core.py").write_text(HELPED.replace("def f(x=0)", "def g(x=1)"))
    outcome = world.run(AFTER.format(order=order).replace("lib.core.f()", "lib.core.g()"))
    assert (outcome["state"], outcome["ok"]) == ("out-of-range", True)


def test_a_function_in_another_module_of_the_library_has_moved(world) -> None:
    """It is there only once that module is imported, and may be imported after the target."""
    core = HELPED.replace('def helper():\n    return "broken"\n', "").replace(
        "return helper()", 'return "broken"'
    )
    proved(world, core)
    (world.site / "lib" / "late.py").write_text('def helper():\n    return "broken"\n')
    outcome = world.run("""
        import diffusers_quantfix as qf, lib.core
        first = qf.status()["fix-f"].reason
        import lib.late
        tell(first=first, then=qf.status()["fix-f"].reason)
    """)
    assert "lib.core:helper is gone" in outcome["first"]
    assert outcome["then"] == outcome["first"].replace("is gone", "has moved to lib.late:helper")


def test_without_sources_nothing_is_proved_and_the_reason_says_so(world) -> None:
    import py_compile

    proved(world)
    core = world.site / "lib" / "core.py"
    py_compile.compile(str(core), cfile=str(core.with_suffix(".pyc")), doraise=True)
    core.unlink()
    outcome = world.run(AFTER.format(order=ORDERS[0]))
    assert (outcome["state"], outcome["f"]) == ("candidate", "broken")
    assert "lib.core:f has no source that can be read" in outcome["reason"]


def test_code_that_another_package_has_replaced_is_not_proved(world) -> None:
    """Even where the probe still says broken."""
    proved(world)
    (world.site / "pasted.py").write_text(
        "import lib.core\ndef other(): return 'broken'\nlib.core.helper = other\n"
    )
    outcome = world.run("import pasted\n" + textwrap.dedent(AFTER.format(order=ORDERS[0])))
    assert (outcome["state"], outcome["f"]) == ("candidate", "broken")
    assert "lib.core:helper was replaced by code of pasted; " in outcome["reason"]


def test_claimed_means_the_number(world) -> None:
    proved(world)
    outcome = world.run(AFTER.format(order=ORDERS[0]), "claimed")
    assert (outcome["state"], outcome["f"]) == ("candidate", "broken")
    assert "because of DIFFUSERS_QUANTFIX=claimed" in outcome["reason"]
    outcome = world.run(AFTER.format(order=ORDERS[0]), "claimed,newer:fix-f")
    assert (outcome["state"], outcome["f"]) == (APPLIED, "patched")


def test_the_same_code_is_patched_again_after_revert_and_stays_what_it_is(world) -> None:
    proved(world)
    outcome = world.run("""
        import diffusers_quantfix as qf, lib.core
        first = str(qf.status()["fix-f"].reason)
        qf.revert()
        off = lib.core.f()
        qf.apply()
        again = qf.apply()["fix-f"]
        tell(first=first, off=off, on=lib.core.f(), again=again.reason, same=again.same_code)
    """)
    assert (outcome["off"], outcome["on"], outcome["same"]) == ("broken", "patched", True)
    assert outcome["again"] == outcome["first"]


@pytest.mark.parametrize(
    "code",
    (HELPED, HELPED.replace("What f does.", "Text."), HELPED.replace("bro", "Bro")),
    ids=("same", "text", "changed"),
)
def test_code_in_a_library_that_is_imported_later_is_waited_for(world, code) -> None:
    """A target of torch that relies on code of diffusers was decided while diffusers was not imported."""
    proved(world, code)
    world.library("host", core=HELPED)
    world.fix(target="host.core", claims={"lib": ">=1,<=2.1"})
    outcome = world.run("""
        import diffusers_quantfix as qf, host.core
        first = states("fix-f")
        report = qf.status()["fix-f"]
        tell(first=first, state=report.state, reason=report.reason, ok=qf.status().ok, f=host.core.f())
    """)
    assert outcome["first"] == "waiting"
    if "Bro" in code:
        assert (outcome["state"], outcome["ok"], outcome["f"]) == ("candidate", False, "broken")
        assert "since lib 2.1 lib.core:helper has changed" in outcome["reason"]
    else:
        assert (outcome["state"], outcome["ok"], outcome["f"]) == ("applied", True, "patched")


@pytest.mark.parametrize(
    ("claim", "state"), [(">=1,!=3.0", "candidate"), (">=3.1", "candidate"), (">=1,<2.9", "applied")]
)
def test_the_same_code_in_a_gap_or_below_a_claim_is_not_patched(world, claim, state) -> None:
    proved(world)
    world.fix(claims={"lib": claim})
    outcome = world.run(AFTER.format(order=ORDERS[0]))
    assert (outcome["state"], outcome["same"]) == (state, state == "applied")


@pytest.mark.parametrize("there", (True, False), ids=("comes", "is gone"))
def test_what_a_module_that_is_being_imported_does_not_have_yet_may_come(world, there) -> None:
    """quanto's package of Marlin imports the target before it has its own class."""
    proved(world, names=("lib.core:f", "lib.packed:Packed"))
    (world.site / "lib" / "packed.py").write_text(
        "import lib.core\n" + ("class Packed: pass\n" if there else "")
    )
    outcome = world.run("""
        import diffusers_quantfix as qf
        import lib.packed
        from diffusers_quantfix import activation
        first = activation._runner().board()["fix-f"].state  # asks nothing
        report = qf.status()["fix-f"]
        tell(first=first, state=report.state, reason=report.reason, f=lib.core.f())
    """)
    assert outcome["first"] == "waiting", outcome["reason"]
    if there:
        assert (outcome["state"], outcome["f"]) == ("applied", "patched")
    else:
        assert (outcome["state"], outcome["f"]) == ("candidate", "broken")
        assert "since lib 2.1 lib.packed:Packed is gone" in outcome["reason"]


def test_a_damaged_data_file_leaves_the_claims(world) -> None:
    proved(world)
    (world.fixes / "proved_code.json").write_text('{"releases": {"lib"')
    outcome = world.run(AFTER.format(order=ORDERS[0]))
    assert (outcome["state"], outcome["f"]) == ("candidate", "broken")


def test_in_a_claimed_release_no_proof_is_read(world) -> None:
    world.library(version="2.0")
    world.fix(claims={"lib": ">=1,<=2.1"})
    (world.fixes / "proved_code.json").mkdir()
    outcome = world.run("""
        import builtins, sys
        opened = []
        real = builtins.open
        builtins.open = lambda file, *args, **kwargs: opened.append(str(file)) or real(file, *args, **kwargs)
        import diffusers_quantfix, lib.core
        tell(s=states("fix-f"), opened=[file for file in opened if "proved_code" in file],
             loaded=[name for name in sys.modules if name.startswith("diffusers_quantfix.engine.")])
    """)
    assert outcome["s"] == "applied"
    assert outcome["opened"] == []
    parts = ("code_marks", "fingerprint", "same_code")
    assert not {f"diffusers_quantfix.engine.{part}" for part in parts} & {*outcome["loaded"]}
