"""Targets that are being imported, fail, or come back, when we look."""

from __future__ import annotations

import textwrap

import pytest

from .harness import CORE, PATCH, PROBE


def test_a_package_that_imports_us_in_the_middle_of_its_own_import(world) -> None:
    world.library(
        __init__="import diffusers_quantfix\nfrom . import core\nfrom .core import f\n"
        + CORE.replace("KEPT", "K"),
        core=CORE,
    )
    world.fix()
    world.fix("fix-package", target="lib")
    outcome = world.run("""
        import lib, diffusers_quantfix as qf
        core = lib.core.f()
        answer = qf.status(load=False)["fix-package"]
        tell(core=core, state=answer.state, f=lib.f())
    """)
    assert outcome.told == {"core": "patched", "state": "applied", "f": "patched"}


def test_asked_in_the_middle_it_says_waiting(world) -> None:
    world.library(
        __init__="import diffusers_quantfix as qf, sys\nsys.said = qf.status()['fix-package']\nqf.apply()\n"
        + CORE
    )
    world.fix("fix-package", target="lib")
    outcome = world.run("""
        import sys, lib
        first = sys.said.state, sys.said.reason
        import diffusers_quantfix
        tell(first=first, applied=diffusers_quantfix.apply()["fix-package"].state, f=lib.f())
    """)
    assert outcome["first"] == [
        "waiting",
        "lib is still being imported; apply() or the next target asks again",
    ]
    assert (outcome["applied"], outcome["f"]) == ("applied", "patched")


@pytest.mark.parametrize("first", ["lib.core", "lib.other"])
def test_circular_imports(world, first) -> None:
    world.library(
        core="from . import other\n" + CORE,
        other="from . import core\n" + CORE,
        __init__="from . import core, other",
    )
    world.fix("fix-core", target="lib.core")
    world.fix("fix-other", target="lib.other")
    world.fix(
        "fix-package",
        target="lib",
        body="def broken(lib): return lib.core.f() != 'patched'\n"
        "def patch(lib, ledger): raise RuntimeError('asked too early')\n",
    )
    outcome = world.run(f"""
        import diffusers_quantfix, {first}
        tell(both=[lib.core.f(), lib.other.f()], states=states("fix-core", "fix-other", "fix-package"))
    """)
    assert outcome.told == {"both": ["patched", "patched"], "states": ["applied", "applied", "healthy"]}


def test_a_target_whose_execution_fails_and_then_succeeds(simple) -> None:
    core = simple.site / "lib" / "core.py"
    good = core.read_text()
    core.write_text(good + "raise OSError('disk')\n")
    outcome = simple.run(f"""
        import diffusers_quantfix, sys
        for _ in range(2):
            try:
                import lib.core
            except OSError as error:
                said = str(error)
        failed = "lib.core" in sys.modules, states("fix-f")
        open({str(core)!r}, "w").write({good!r})
        import lib.core
        tell(said=said, failed=failed, f=lib.core.f(), state=states("fix-f"))
    """)
    assert outcome.told == {"said": "disk", "failed": [False, "waiting"], "f": "patched", "state": "applied"}


def test_a_reload_that_raises(simple) -> None:
    core = simple.site / "lib" / "core.py"
    outcome = simple.run(f"""
        import importlib, diffusers_quantfix as qf, lib.core
        first = lib.core.f
        good = open({str(core)!r}).read()
        open({str(core)!r}, "w").write(good + "raise OSError('disk')")
        try:
            importlib.reload(lib.core)
        except OSError as error:
            said = str(error)
        half = lib.core.f(), states("fix-f"), reason("fix-f")
        applied = qf.apply()["fix-f"].state, lib.core.f()
        reverted = qf.revert()["fix-f"].state, lib.core.f is lib.core.KEPT[0]
        open({str(core)!r}, "w").write(good)
        qf.apply()
        importlib.reload(lib.core)
        tell(said=said, half=half, applied=applied, reverted=reverted, last=[lib.core.f(), states("fix-f")])
    """)
    assert outcome["said"] == "disk"
    value, state, sentence = outcome["half"]
    assert (value, state) == ("broken", "overwritten")
    assert sentence == "lib.core.f now holds code of lib.core; apply() tries to install it again"
    assert outcome["applied"] == ["applied", "patched"]
    assert outcome["reverted"] == ["disabled", True]
    assert outcome["last"] == ["patched", "applied"]


def test_revert_after_a_failed_reload_leaves_the_new_code(simple) -> None:
    core = simple.site / "lib" / "core.py"
    outcome = simple.run(f"""
        import importlib, diffusers_quantfix as qf, lib.core
        open({str(core)!r}, "a").write("raise OSError('disk')")
        try:
            importlib.reload(lib.core)
        except OSError:
            pass
        tell(state=qf.revert()["fix-f"].state, new=lib.core.f is lib.core.KEPT[0])
    """)
    assert outcome.told == {"state": "disabled", "new": True}


def test_a_reload_of_a_patched_release_retires_the_fix(simple) -> None:
    core = simple.site / "lib" / "core.py"
    outcome = simple.run(f"""
        import importlib, diffusers_quantfix as qf, lib.core
        open({str(core)!r}, "w").write("def f(): return 'fine'")
        importlib.reload(lib.core)
        first = lib.core.f(), states("fix-f")
        qf.revert()
        tell(first=first, last=lib.core.f())
    """)
    assert outcome.told == {"first": ["fine", "healthy"], "last": "fine"}


def test_a_target_deleted_and_imported_anew(simple) -> None:
    outcome = simple.run("""
        import sys, diffusers_quantfix as qf, lib.core
        old = lib.core
        del sys.modules["lib.core"]
        gone = qf.apply()["fix-f"].state
        import lib.core
        new = sys.modules["lib.core"]
        values = old is not new, old.f(), new.f(), states("fix-f")
        qf.revert()
        tell(gone=gone, values=values, originals=[old.f is old.KEPT[0], new.f is new.KEPT[0]])
    """)
    assert outcome["values"] == [True, "patched", "patched", "applied"]
    assert outcome["originals"] == [True, True]
    assert outcome["gone"] == "applied"


@pytest.mark.parametrize("blocked", ["lib", "lib.core"])
def test_a_blocked_import_stays_blocked(simple, blocked) -> None:
    outcome = simple.run(f"""
        import sys, diffusers_quantfix as qf
        sys.modules[{blocked!r}] = None
        try:
            import lib.core
        except ModuleNotFoundError as error:
            tell(said=str(error), state=qf.status()["fix-f"].state)
    """)
    assert "lib" in outcome["said"]
    assert outcome["state"] in ("waiting", "missing")


def test_a_hand_made_module_without_a_spec(simple) -> None:
    outcome = simple.run("""
        import sys, types, diffusers_quantfix as qf
        made = types.ModuleType("lib.core")
        made.f = lambda: "broken"
        sys.modules["lib.core"] = made
        tell(state=qf.status()["fix-f"].state, f=made.f())
    """)
    assert outcome.told == {"state": "applied", "f": "patched"}


STAND_INS = {
    "a mock": "from unittest.mock import MagicMock as StandIn",
    "raises": """
        class StandIn:
            def __getattr__(self, name):
                raise ImportError("lib is not installed")""",
    "a module that raises": """
        class StandIn(type(sys)):
            def __init__(self):
                super().__init__("lib")
            def __getattribute__(self, name):
                raise ImportError("lib is not installed")""",
}


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_what_stands_in_for_a_library_is_not_asked(simple, stand_in) -> None:
    """One that raises cost every fix, and `status` raised its error; a mock was asked by each probe."""
    simple.fix("fix-other", target="other.core")
    (simple.site / "other").mkdir()
    (simple.site / "other" / "__init__.py").write_text("")
    (simple.site / "other" / "core.py").write_text("def f(): return 'broken'\n")
    outcome = simple.run(
        f"import sys\n{textwrap.dedent(STAND_INS[stand_in])}\n"
        "sys.modules['lib'], sys.modules['lib.core'] = StandIn(), StandIn()\n"
        "import diffusers_quantfix as qf, other.core\n"
        "board = qf.status()\n"
        "tell(states=[(one.state, one.reason) for one in (board['fix-f'], board['fix-other'])], f=other.core.f())\n"
    )
    state, reason = outcome.told["states"][0]
    assert state == "waiting"
    assert (
        reason == "what stands in for lib.core is no module" or "ImportError: lib is not installed" in reason
    )
    assert outcome.told["f"] == "patched"
    assert not outcome.err


def test_a_module_whose_class_hides_its_namespace(simple) -> None:
    """It stands beside the target, where copies of a function are looked for: the fix could not be installed."""
    outcome = simple.run("""
        import sys, lib.core
        class Hidden(type(sys)):
            @property
            def __dict__(self):
                raise ImportError("not now")
        sys.modules["lib.hidden"] = Hidden("lib.hidden")
        import diffusers_quantfix as qf
        tell(state=qf.status()["fix-f"].state, f=lib.core.f())
    """)
    assert outcome.told == {"state": "applied", "f": "patched"}
    assert not outcome.err


def test_a_mock_of_torch(simple) -> None:
    """Documentation is built so, in an environment that has torch: each fix was logged as failed."""
    outcome = simple.run("""
        import sys, types
        sys.modules["torch"] = types.ModuleType("torch")
        import diffusers_quantfix as qf, lib.core
        tell(state=qf.status()["fix-f"].state, f=lib.core.f())
    """)
    assert outcome.told == {"state": "applied", "f": "patched"}
    assert not outcome.err


METHODS = """
class Base:
    def f(self):
        return "broken"

class Layer(Base):
    def f(self):
        return super().f()  # it refers to its class

def g():
    return "broken"
"""
ASKED_ONCE = """
def broken(module):
    return module.Layer().f() in ("broken", "patched")

def patch(module, draft):
    def make(original):
        def f(*arguments):
            assert original(*arguments) == "broken"
            return "patched"
        return f
    draft.wrap_plain(module.Layer, "f", make)
    draft.replace(module.g, "__code__", (lambda: "patched").__code__)
"""
AGAIN = {
    "reload": 'importlib.reload(sys.modules["lib.core"])',
    "deleted": 'del sys.modules["lib.core"]; import lib.core',
    "package-deleted": 'for name in [name for name in sys.modules if name.startswith("lib")]: del sys.modules[name]\n'
    "import lib.core",
}


@pytest.fixture
def methods(world):
    world.library(core=METHODS, other="import lib.core")
    world.fix("fix-once", body=ASKED_ONCE, asked_once=True)
    # Its target is another module, which is not executed again.
    world.fix(
        "fix-other",
        target="lib.other",
        asked_once=True,
        body="""
        import sys

        def broken(module):
            return True

        def patch(module, draft):
            def make(original):
                return lambda *arguments: original(*arguments) + " twice"
            draft.wrap_plain(sys.modules["lib.core"].Layer, "f", make)
        """,
    )
    return world


@pytest.mark.parametrize("again", AGAIN)
def test_classes_and_functions_of_a_module_that_is_executed_again(methods, again) -> None:
    outcome = methods.run(f"""
        import importlib, sys
        import diffusers_quantfix as qf, lib.other, lib.core
        old = lib.core.Layer, lib.core.g
        def now(layer, g):
            return [layer().f(), g()]
        first = now(*old)
        {textwrap.indent(AGAIN[again], " " * 8).strip()}
        import lib.other
        core = sys.modules["lib.core"]
        kept = states("fix-once", "fix-other"), now(core.Layer, core.g), now(*old)
        qf.revert()
        tell(first=first, kept=kept, last=[now(core.Layer, core.g), now(*old)], same=core.Layer is old[0])
    """)
    assert outcome["first"] == ["patched twice", "patched"]
    assert outcome["kept"] == [["applied", "applied"], *2 * [["patched twice", "patched"]]]
    assert outcome["last"] == 2 * [["broken", "broken"]]
    assert not outcome["same"]


def test_what_nobody_saw_executed_again_is_said_and_mended(methods) -> None:
    outcome = methods.run("""
        import sys
        import diffusers_quantfix as qf, lib.other, lib.core
        exec(compile(open(lib.core.__file__).read(), lib.core.__file__, "exec"), vars(lib.core))
        said = states("fix-once", "fix-other"), reason("fix-once"), lib.core.Layer().f(), lib.core.g()
        qf.apply()
        tell(said=said, mended=[states("fix-once", "fix-other"), lib.core.Layer().f(), lib.core.g()])
    """)
    state, reason, *values = outcome["said"]
    assert state == ["overwritten", "overwritten"]
    assert reason.startswith("lib.core.Layer was defined again; ")
    assert values == ["broken", "broken"]
    assert outcome["mended"] == [["applied", "applied"], "patched twice", "patched"]


def test_an_import_that_is_interrupted_while_it_is_patched_and_repeated(methods) -> None:
    methods.fix(
        "fix-third",
        body="""
        stopped = []

        def broken(module):
            if not stopped:
                stopped.append(module)
                raise KeyboardInterrupt
            return True

        def patch(module, draft):
            draft.wrap_plain(module.Layer, "f", lambda original: lambda *arguments: original(*arguments) + " more")
        """,
        asked_once=True,
    )
    outcome = methods.run("""
        import diffusers_quantfix as qf
        try:
            import lib.other
        except KeyboardInterrupt:
            import lib.other
        import lib.core
        tell(states=states("fix-once", "fix-other", "fix-third"), value=lib.core.Layer().f(), g=lib.core.g())
    """)
    assert outcome["states"] == ["applied", "applied", "applied"]
    assert outcome["g"] == "patched" and outcome["value"].split() == ["patched", "more", "twice"]


def test_what_stands_in_for_a_patched_object_is_not_another_execution(methods) -> None:
    outcome = methods.run("""
        import sys
        import diffusers_quantfix as qf, lib.other, lib.core
        core, layer = lib.core, lib.core.Layer
        class Faster(layer):
            pass
        core.Layer = Faster
        wrapped = core.g
        core.g = lambda: wrapped()
        core.g.__wrapped__ = wrapped
        first = states("fix-once", "fix-other")
        stand_in = type(sys)("lib.core")
        vars(stand_in).update(vars(core))
        sys.modules["lib.core"] = stand_in
        tell(states=[first, states("fix-once", "fix-other")], value=stand_in.Layer().f())
    """)
    assert outcome["states"] == 2 * [["applied", "applied"]]
    assert outcome["value"] == "patched twice"


@pytest.mark.parametrize("lazy", [False, True], ids=["", "lazy"])
@pytest.mark.parametrize("where", ["broken", "patch"])
def test_a_module_that_another_thread_is_importing(world, where, lazy) -> None:
    """It was "failed" for good."""
    world.library(
        core=CORE, other="", slow="import sys, threading\nsys.begun.set()\nsys.may_end.wait()\ndef f(): pass"
    )
    body = (PROBE + PATCH).replace(f"def {where}(", f"def really_{where}(") + textwrap.dedent(f"""
        def {where}(*given):
            import sys
            try:
                sys.modules["lib.slow"].f
            except AttributeError as error:
                if {lazy}:  # as diffusers' lazy modules do
                    raise RuntimeError("Failed to import lib.slow because of: " + str(error)) from error
                raise
            return really_{where}(*given)
    """)
    world.fix(body=body)
    world.fix("fix-other", target="lib.other")
    outcome = world.run("""
        import sys, threading
        import diffusers_quantfix as qf
        sys.begun, sys.may_end = threading.Event(), threading.Event()
        def work():
            import lib.slow
        def begin():
            thread = threading.Thread(target=work)
            thread.start()
            sys.begun.wait()
            return thread
        thread = begin()
        import lib.core
        early = reason("fix-f"), states("fix-f"), lib.core.f()
        sys.may_end.set()
        thread.join()
        import lib.other
        later = states("fix-f"), lib.core.f()
        sys.begun.clear(), sys.may_end.clear(), sys.modules.pop("lib.slow")
        thread = begin()
        qf.apply()
        tell(early=early, later=later, again=states("fix-f"))
        sys.may_end.set()
        thread.join()
    """)
    reason, *early = outcome["early"]
    assert reason.startswith("cannot be decided before an import has ended (")
    assert "partially initialized module" in reason
    assert early == ["waiting", "broken"]
    assert outcome["later"] == ["applied", "patched"]
    assert outcome["again"] == "applied"


PARTLY = """
import sys

def broken(module):
    return module.g() == "broken"  # its other slot is not looked at

def patch(module, draft):
    draft.wrap_plain(module, "g", lambda original: lambda: "patched")
    made = lambda original: lambda *arguments: original(*arguments) + ", patched"
    draft.wrap_plain(sys.modules["lib.core"].Layer, "f", made)
"""


def test_a_fix_whose_other_slot_is_in_a_module_that_is_executed_again(world) -> None:
    """The probe says "not broken", as the slot that it looks at is still patched."""
    world.library(core=METHODS, other="import lib.core\ndef g():\n    return 'broken'")
    world.fix("fix-once", body=ASKED_ONCE, asked_once=True)
    world.fix(target="lib.other", body=PARTLY)
    outcome = world.run("""
        import importlib
        import diffusers_quantfix as qf, lib.other, lib.core
        old = lib.core.Layer
        importlib.reload(lib.core)
        again = states("fix-f"), lib.core.Layer().f(), old().f()
        qf.apply()
        applied = states("fix-f"), lib.core.Layer().f(), old().f()
        qf.revert()
        tell(again=again, applied=applied, last=[lib.core.Layer().f(), old().f(), lib.other.g()])
    """)
    assert outcome["again"] == outcome["applied"] == ["applied", "patched, patched", "patched, patched"]
    assert outcome["last"] == ["broken", "broken", "broken"]


def test_a_decorated_class_and_modules_that_come_back_are_not_executed_again(methods) -> None:
    outcome = methods.run("""
        import functools, sys
        from unittest import mock
        import diffusers_quantfix as qf, lib.other, lib.core
        old = lib.core.Layer
        with mock.patch.dict(sys.modules):
            for name in [name for name in sys.modules if name.startswith("lib")]:
                del sys.modules[name]
            import lib.other
        import lib.core
        back = states("fix-once", "fix-other"), lib.core.Layer is old, old().f()
        class New(old):
            pass
        functools.update_wrapper(New, old, updated=())
        lib.core.Layer = New
        tell(back=back, decorated=[states("fix-once", "fix-other"), New().f()])
    """)
    assert outcome["back"] == [["applied", "applied"], True, "patched twice"]
    assert outcome["decorated"] == [["applied", "applied"], "patched twice"]


def test_what_is_executed_again_and_again_is_freed(methods) -> None:
    outcome = methods.run("""
        import gc, importlib, weakref
        import diffusers_quantfix as qf, lib.other, lib.core
        classes = []
        for _ in range(10):
            classes.append(weakref.ref(lib.core.Layer))
            importlib.reload(lib.core)
        gc.collect()
        alive = sum(one() is not None for one in classes)
        tell(alive=alive, states=states("fix-once", "fix-other"), f=lib.core.Layer().f())
    """)
    assert outcome["alive"] <= 2
    assert outcome["states"] == ["applied", "applied"] and outcome["f"] == "patched twice"


INTERRUPTED = """
import lib.core, sys
if not hasattr(sys, "once"):
    sys.once = 1
    raise KeyboardInterrupt
"""
DOTTED = """
from diffusers_quantfix.engine.probe import resolve
def broken(module):
    return resolve(module, "core.f")() == "broken"
def patch(module, ledger):
    ledger.wrap_plain(resolve(module, "core"), "f", lambda original: lambda: "patched")
"""


def test_a_submodule_that_its_package_lost(world) -> None:
    """Python sets no attribute for a submodule that an interrupted import of the package has left in `sys.modules`."""
    world.library(__init__=INTERRUPTED, core=CORE)
    world.fix(target="lib", body=DOTTED)
    outcome = world.run("""
        import sys, diffusers_quantfix
        try:
            import lib
        except KeyboardInterrupt:
            import lib
        assert not hasattr(lib, "core")
        tell(f=sys.modules["lib.core"].f(), state=states("fix-f"))
    """)
    assert outcome.told == {"f": "patched", "state": "applied"}
