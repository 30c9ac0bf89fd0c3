"""Every state of the board, with its sentence; a fault of one fix never stops the next, nor the import."""

from __future__ import annotations

import pytest

from .harness import CORE, PATCH, PROBE

# How a fix can go wrong: its file -> what the board must say.
FAULTS = {
    "probe raises": (
        "def broken(m): raise ValueError('odd\\nrelease')" + PATCH,
        "its probe failed: ValueError: odd release",
    ),
    "probe exits": ("def broken(m): raise SystemExit(3)" + PATCH, "its probe failed: SystemExit: 3"),
    "patch raises": (
        PROBE + "def patch(m, ledger): 1 / 0",
        "could not be installed: ZeroDivisionError: division by zero",
    ),
    "patch does nothing": (
        PROBE + "def patch(m, ledger): pass",
        "the bug is still present after patching; removed again",
    ),
    "patch does not help": (
        PROBE + "def patch(m, ledger): ledger.replace(m, 'f', lambda: 'broken')",
        "the bug is still present after patching; removed again",
    ),
    "probe raises after the patch": (
        PROBE + "def patch(m, ledger): ledger.replace(m, 'f', None)",
        "its probe failed after patching: TypeError: 'NoneType' object is not callable; removed again",
    ),
    "second write fails": (
        PROBE
        + "def patch(m, ledger):\n"
        + "    ledger.replace(m, 'f', lambda: 'patched')\n"
        + "    ledger.replace(m.Stubborn, 'method', lambda self: 'patched')",
        "could not be installed: AttributeError: stubborn",
    ),
    "no probe": ("def patch(m, ledger): pass", "its own file could not be read: AttributeError"),
    "no sense": ("def broken(", "its own file could not be read: SyntaxError"),
    "odd import": ("import no_such_module", "its own file could not be read: ModuleNotFoundError"),
}

STUBBORN = (
    CORE
    + """
class Meta(type):
    def __setattr__(cls, name, value):
        super().__setattr__(name, value)  # written, and then a fault: nothing may stay
        if getattr(value, "__name__", "") == "<lambda>":
            raise AttributeError("stubborn")

class Stubborn(metaclass=Meta):
    prop = property(lambda self: 1)
    def method(self):
        return "broken"

KEPT.append(vars(Stubborn)["method"])
"""
)


@pytest.fixture
def faulty(world):
    """A good fix, every bad one, and a good one again, in the order of the index."""
    world.library(core=STUBBORN, second="def f():\n    return 'broken'\n")
    for number, (body, _) in enumerate(FAULTS.values()):
        world.fix(f"bad-{number:02}", body=body)
    world.fix("bad-claim", claims={"lib": "at least two"})
    world.fix("good-core")
    world.fix("good-second", target="lib.second")
    return world


def test_every_fault_has_its_sentence_and_touches_nothing(faulty) -> None:
    del faulty.targets["good-core"]
    ids = sorted(faulty.targets)
    outcome = faulty.run(f"""
        import logging
        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("diffusers_quantfix").addHandler(handler)
        import diffusers_quantfix, lib.core, lib.second
        import diffusers_quantfix as qf
        board = qf.status(load=False)
        logged = len(records)
        qf.apply(); qf.apply(); qf.status()
        core = lib.core
        tell(states=[board[name].state for name in {ids!r}], reasons={{a.id: a.reason for a in board}},
             untouched=core.f is core.KEPT[0] and vars(core.Stubborn)["method"] is core.KEPT[1],
             second=lib.second.f(), ok=board.ok, once=len(records) == logged, logged=records)
    """)
    assert outcome["states"] == ["failed"] * (len(ids) - 1) + ["applied"]
    for number, (name, (_, sentence)) in enumerate(FAULTS.items()):
        assert sentence in outcome["reasons"][f"bad-{number:02}"], name
    assert (
        "could not be decided" in outcome["reasons"]["bad-claim"]
        or "InvalidSpecifier" in outcome["reasons"]["bad-claim"]
    )
    assert outcome["untouched"]
    assert outcome["second"] == "patched"
    assert outcome["ok"] is False
    assert outcome["once"], "a fault is logged once"
    assert len(outcome["logged"]) == len(ids) - 1
    assert "\n" not in "".join(outcome["reasons"].values())
    assert not outcome.out


def test_a_fix_for_the_same_target_is_asked_after_the_bad_ones(faulty) -> None:
    outcome = faulty.run(
        "import lib.core, diffusers_quantfix; tell(state=states('good-core'), f=lib.core.f())"
    )
    assert outcome.told == {"state": "applied", "f": "patched"}


QUIET = {  # claims, files, body -> state, sentence
    "applied": ({"lib": "<2"}, CORE, PROBE, "patched here (lib 1.0)"),
    "healthy": (
        {"lib": "<2"},
        CORE.replace("broken", "fine"),
        PROBE,
        "the bug is not present in lib 1.0; not patched",
    ),
    "out-of-range": (
        {"lib": "<1"},
        CORE.replace("broken", "fine"),
        PROBE,
        "lib 1.0 is outside <1; fixed upstream in lib 0.9",
    ),
    "candidate": ({"lib": ">1"}, CORE, PROBE, "the bug seems to be present although lib 1.0 is outside >1"),
    "missing": (
        {"lib": "<2"},
        "g = 1",
        PROBE.replace("module.f()", "resolve(module, 'f')()"),
        "lib.core has no f",
    ),
}


@pytest.mark.parametrize("state", QUIET)
@pytest.mark.parametrize("order", ["us, lib.core", "lib.core, us"])
def test_states_of_an_imported_target(world, state, order) -> None:
    claims, core, probe, sentence = QUIET[state]
    world.library(core=core)
    world.fix(
        claims=claims,
        fixed_in="lib 0.9",
        body="from diffusers_quantfix.engine.probe import resolve\n" + probe + PATCH,
    )
    outcome = world.run(f"""
        import {order.replace("us", "diffusers_quantfix")}
        before = states("fix-f")
        board = diffusers_quantfix.status()
        answer = board["fix-f"]
        tell(before=before, state=answer.state, reason=answer.reason, ok=board.ok, changes=answer.changes)
    """)
    assert (outcome["before"], outcome["state"]) == (state, state)
    assert sentence in outcome["reason"]
    assert outcome["ok"]
    assert outcome["changes"] == (["lib.core.f"] if state == "applied" else [])
    assert not outcome.err and not outcome.out


def test_a_probe_that_fails_outside_its_range_is_no_fault(world) -> None:
    world.library(version="3.0")
    world.fix("raises", body="def broken(m): raise ValueError" + PATCH)
    world.fix(
        "gone",
        body="from diffusers_quantfix.engine.errors import TargetMissing\ndef broken(m): raise TargetMissing"
        + PATCH,
    )
    outcome = world.run("import diffusers_quantfix, lib.core; tell(states=states('raises', 'gone'))")
    assert outcome["states"] == ["out-of-range", "out-of-range"]
    assert not outcome.err


def test_waiting_and_missing(world) -> None:
    world.library()
    world.fix("here")
    world.fix("module-gone", target="lib.gone")
    world.fix("part-gone", target="lib.gone.deeper")
    world.fix("not-installed", target="absent.core", claims={"absent": "<2"})
    world.fix("companion-not-installed", claims={"lib": "<2", "friend": ">=1"})
    ids = tuple(world.targets)
    outcome = world.run(f"""
        import sys, diffusers_quantfix as qf
        waiting = states(*{ids!r}), [a.reason for a in qf.status(load=False)], "lib" in sys.modules
        board = qf.status()
        tell(waiting=waiting, states=[board[name].state for name in {ids!r}], loaded=board.loaded, ok=board.ok,
             reasons={{a.id: a.reason for a in board}}, again=qf.status().loaded)
    """)
    states, reasons, imported = outcome["waiting"]
    assert states == ["waiting", "waiting", "waiting", "missing", "waiting"]
    assert "lib.core has not been imported yet" in reasons
    assert not imported
    assert outcome["states"] == ["applied", "missing", "missing", "missing", "missing"]
    assert outcome["reasons"]["module-gone"] == "lib 1.0 has no module lib.gone"
    assert outcome["reasons"]["part-gone"] == "lib 1.0 has no module lib.gone"
    assert outcome["reasons"]["not-installed"] == "absent is not installed"
    assert outcome["reasons"]["companion-not-installed"] == "friend is not installed"
    assert outcome["loaded"] == ["lib.core"]
    assert outcome["again"] == []
    assert outcome["ok"]


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("raise RuntimeError('CUDA\\nSetup failed')", "RuntimeError: CUDA Setup failed"),
        ("import not_there_either", "ModuleNotFoundError: No module named 'not_there_either'"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("import", "SyntaxError"),
    ],
)
def test_a_library_that_cannot_be_imported(world, file, sentence) -> None:
    world.library(core=file)
    world.fix()
    outcome = world.run("""
        import diffusers_quantfix as qf
        board = qf.status()
        later = qf.status(load=False)
        tell(state=board["fix-f"].state, reason=board["fix-f"].reason, ok=board.ok, later=later["fix-f"].reason)
    """)
    assert outcome["state"] == "waiting"
    assert outcome["reason"].startswith("lib is installed but cannot be imported: ")
    assert sentence in outcome["reason"]
    assert outcome["later"] == outcome["reason"]
    assert outcome["ok"] is False


def test_a_library_that_the_program_hides(world) -> None:
    """``sys.modules[name] = None`` is how a program does without an installed library."""
    world.library()
    world.fix(body="def broken(module):\n    import friend.part\n" + PATCH)
    outcome = world.run("""
        import sys, diffusers_quantfix
        sys.modules["friend"] = None
        import lib.core
        tell(state=states("fix-f"), reason=reason("fix-f"))
    """)
    assert outcome.told == {"state": "missing", "reason": "nothing to patch here: sys.modules hides friend"}
    assert not outcome.err


def test_a_target_that_fails_once_is_patched_when_it_comes(world) -> None:
    world.library(
        core="import sys\nif not sys.__dict__.get('ready'): raise RuntimeError('too early')\n" + CORE
    )
    world.fix()
    outcome = world.run("""
        import sys, diffusers_quantfix as qf
        try:
            import lib.core
        except RuntimeError as error:
            first = str(error), qf.status()["fix-f"].state
        sys.ready = True
        import lib.core
        tell(first=first, f=lib.core.f(), state=states("fix-f"))
    """)
    assert outcome.told == {"first": ["too early", "waiting"], "f": "patched", "state": "applied"}


@pytest.mark.parametrize("version", ["banana", "", "1.0 final"])
def test_a_corrupt_version_is_said_once_and_nothing_is_touched(world, version) -> None:
    world.library(version=version)
    world.fix()
    world.fix("fix-g")
    outcome = world.run("""
        import diffusers_quantfix as qf, lib.core
        tell(states=states("fix-f", "fix-g"), reason=reason("fix-f"), f=lib.core.f(),
             installed=qf.status().installed, table=str(qf.status()))
    """)
    assert outcome["states"] == ["failed", "failed"]
    assert outcome["reason"] == f"lib states the version {version!r}, which is not valid; reinstall lib"
    assert outcome["f"] == "broken"
    assert outcome["installed"] == {"lib": version}
    assert outcome.err.count("which is not valid") == 1
    assert ("(unreadable version)" in outcome["table"]) == (version == "")


@pytest.mark.parametrize("revert", [False, True])
def test_overwritten_by_a_stranger(simple, revert) -> None:
    (simple.site / "stranger.py").write_text("def other():\n    return 'broken'\n")
    outcome = simple.run(f"""
        import diffusers_quantfix as qf, lib.core, stranger
        ours, lib.core.f = lib.core.f, stranger.other
        before = states("fix-f"), reason("fix-f"), qf.status().ok
        if {revert}:
            qf.revert()
            refused = states("fix-f"), reason("fix-f"), lib.core.f is stranger.other
            lib.core.f = ours
            qf.revert()
            tell(refused=refused, after=states("fix-f"), original=lib.core.f is lib.core.KEPT[0])
        else:
            tell(after=qf.apply()["fix-f"].state, f=lib.core.f())
        tell(before=before)
    """)
    state, reason, ok = outcome["before"]
    assert state == "overwritten"
    assert "lib.core.f now holds code of stranger" in reason
    assert not ok
    if revert:
        state, reason, stays = outcome["refused"]
        assert (state, stays) == ("overwritten", True)
        assert "cannot be removed: lib.core.f now holds code of stranger" in reason
        assert (outcome["after"], outcome["original"]) == ("disabled", True)
    else:
        assert (outcome["after"], outcome["f"]) == ("applied", "patched")


UNDECIDED = """
import sys
from diffusers_quantfix.engine.errors import Undecided
def broken(module):
    if "lib.second" not in sys.modules:
        raise Undecided("lib.second")
    return module.f() == "broken"
"""


@pytest.mark.parametrize("order", ["lib.core, lib.third, lib.second", "lib.second, lib.core, lib.third"])
def test_a_probe_that_needs_another_module_is_asked_again_when_it_is_there(world, order) -> None:
    """It answered "healthy" permanently, and the bug stayed."""
    world.library(core=CORE, second="", third=CORE)
    world.fix(body=UNDECIDED + PATCH)
    world.fix(
        "fix-second", target="lib.second", body="def broken(m): return False\ndef patch(m, draft): pass"
    )
    outcome = world.run(f"import diffusers_quantfix, {order}; tell(f=lib.core.f(), state=states('fix-f'))")
    assert outcome.told == {"f": "patched", "state": "applied"}


def test_status_imports_what_a_probe_needs(world) -> None:
    world.library(core=CORE, second="")
    world.fix(body=UNDECIDED + PATCH)
    outcome = world.run("""
        import diffusers_quantfix as qf, lib.core
        before = states("fix-f"), reason("fix-f")
        board = qf.status()
        tell(before=before, state=board["fix-f"].state, loaded=board.loaded, f=lib.core.f())
    """)
    assert outcome["before"] == ["waiting", "cannot be decided before lib.second is imported"]
    assert (outcome["state"], outcome["loaded"], outcome["f"]) == ("applied", ["lib.second"], "patched")


def test_status_imports_what_a_probe_needs_one_after_the_other(world) -> None:
    """It was left waiting at the second module, and `status` ended with 1."""
    world.library(core=CORE, second="", third="")
    text = UNDECIDED.replace(
        "    return",
        """    if "lib.third" not in sys.modules:
        raise Undecided("lib.third")
    return""",
    )
    world.fix(body=text + PATCH)
    outcome = world.run("""
        import diffusers_quantfix as qf, lib.core
        board = qf.status()
        tell(state=board["fix-f"].state, loaded=board.loaded, ok=board.ok)
    """)
    assert outcome.told == {"state": "applied", "loaded": ["lib.second", "lib.third"], "ok": True}


def test_status_ends_where_what_a_probe_needs_cannot_be_imported(world) -> None:
    """The reason did not say why."""
    world.library(core=CORE, second="raise ImportError('no')")
    world.fix(body=UNDECIDED + PATCH)
    outcome = world.run("""
        import diffusers_quantfix as qf, lib.core
        answers = [qf.status()["fix-f"] for _ in range(2)]
        tell(answers=[(answer.state, answer.reason) for answer in answers])
    """)
    why = "cannot be decided before lib.second is imported: lib is installed but cannot be imported: ImportError: no"
    assert outcome["answers"] == [["waiting", why]] * 2


def test_an_applied_fix_stays_applied_while_its_probe_cannot_decide(world) -> None:
    """It said "waiting", with the patch in place."""
    world.library(core=CORE, second="")
    world.fix(body=UNDECIDED + PATCH)
    outcome = world.run("""
        import sys, diffusers_quantfix as qf, lib.second, lib.core
        before = states("fix-f")
        del sys.modules["lib.second"]
        qf.apply()
        after = states("fix-f"), lib.core.f()
        qf.revert()
        tell(before=before, after=after, last=lib.core.f())
    """)
    assert outcome.told == {"before": "applied", "after": ["applied", "patched"], "last": "broken"}


def test_status_while_another_thread_writes_an_answer(world) -> None:
    """It ended in "dictionary changed size during iteration"."""
    world.library()
    world.fix()
    outcome = world.run("""
        import diffusers_quantfix as qf, lib.core
        from diffusers_quantfix.process_runner import RUNNER
        class Busy:
            above, needs = False, ""
            @property
            def state(self):  # as another thread does between two steps
                if len(RUNNER._answers) < 9:
                    RUNNER._answers[len(RUNNER._answers)] = Busy()
                return "healthy"
        RUNNER._answers[0] = Busy()
        tell(state=qf.status()["fix-f"].state)
    """)
    assert outcome["state"] == "applied"


OF_THE_LIBRARY = """
ASKED = []
def broken(module):
    function = module.f
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    ASKED.append("broken" in function.__code__.co_consts)
    return ASKED[-1]
"""


def test_a_probe_of_the_code_below_the_patch_is_not_asked_while_the_patch_is_in_place(world) -> None:
    world.library()
    world.fix(body=OF_THE_LIBRARY + PATCH, asked_once=True)
    world.fix("fix-asked-twice", body=OF_THE_LIBRARY + PATCH)
    outcome = world.run("""
        import lib.core, importlib, diffusers_quantfix as qf
        from diffusers_quantfix.fixes import fix_f
        first = lib.core.f(), len(fix_f.ASKED), states("fix-f", "fix-asked-twice")
        qf.apply()
        again = lib.core.f(), len(fix_f.ASKED), states("fix-f")
        importlib.reload(lib.core)
        reloaded = lib.core.f(), len(fix_f.ASKED), states("fix-f")
        lib.core.f = lib.core.KEPT[0]
        qf.apply()
        written_over = lib.core.f(), len(fix_f.ASKED), states("fix-f")
        qf.revert()
        reverted = lib.core.f(), len(fix_f.ASKED)
        qf.apply()
        last = lib.core.f(), len(fix_f.ASKED)
        tell(first=first, again=again, reloaded=reloaded, written_over=written_over, reverted=reverted, last=last)
    """)
    assert outcome["first"] == ["patched", 1, ["applied", "failed"]], (
        "the other one's probe asks the same code again"
    )
    assert outcome["again"] == ["patched", 1, "applied"]
    assert outcome["reloaded"] == ["patched", 2, "applied"]
    assert outcome["written_over"] == ["patched", 3, "applied"]
    assert outcome["reverted"] == ["broken", 3]
    assert outcome["last"] == ["patched", 4]


def test_a_healthy_library_is_not_patched_by_a_fix_that_is_asked_once(world) -> None:
    world.library(core=CORE.replace('"broken"', '"healthy"'))
    world.fix(body=OF_THE_LIBRARY + PATCH, asked_once=True)
    outcome = world.run("import lib.core; tell(found=[lib.core.f(), states('fix-f')])")
    assert outcome["found"] == ["healthy", "healthy"]
