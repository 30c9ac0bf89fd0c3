"""Imports in several threads: everything is patched, nothing twice, no deadlock.

A deadlock shows as the time limit of the script.
"""

from __future__ import annotations

SLOW = """
import time
def f():
    return "broken"
KEPT = [f]
time.sleep(0.1)
"""

COUNTING = """
import sys, time
def broken(module):
    return module.f() == "broken"
def patch(module, ledger):
    calls = sys.__dict__.setdefault("patches", [])
    calls.append(module.__name__)
    time.sleep(0.1)
    ledger.wrap_plain(module, "f", lambda original: lambda: "patched" if original() == "broken" else "twice")
"""

THREADS = """
import importlib, sys, threading
barrier = threading.Barrier({number})
faults = []
def work(names):
    barrier.wait()
    for name in names:
        module = importlib.import_module(name)
        if module.f() != "patched":
            faults.append(name + " " + module.f())
def together(*jobs):
    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_two_threads_two_targets(world) -> None:
    world.library(one=SLOW, two=SLOW)
    world.fix("fix-one", "lib.one", body=COUNTING)
    world.fix("fix-two", "lib.two", body=COUNTING)
    outcome = world.run(
        THREADS.format(number=2)
        + """
import diffusers_quantfix
together(["lib.one"], ["lib.two"])
tell(faults=faults, patches=sorted(sys.patches), states=states("fix-one", "fix-two"))
"""
    )
    assert outcome.told == {"faults": [], "patches": ["lib.one", "lib.two"], "states": ["applied", "applied"]}


def test_many_threads_one_target(world) -> None:
    world.library(one=SLOW)
    world.fix("fix-one", "lib.one", body=COUNTING)
    outcome = world.run(
        THREADS.format(number=8)
        + """
import diffusers_quantfix
together(*[["lib.one"]] * 8)
tell(faults=faults, patches=sys.patches)
"""
    )
    assert outcome.told == {"faults": [], "patches": ["lib.one"]}


def test_patches_that_import_each_others_targets(world) -> None:
    """Each thread holds the import lock of its target while its fix imports the other's."""
    for name, other in (("one", "two"), ("two", "one")):
        world.fix(
            f"fix-{name}",
            f"lib.{name}",
            body=COUNTING.replace("time.sleep(0.1)", f"time.sleep(0.1); import lib.{other}"),
        )
    world.library(one=SLOW, two=SLOW)
    outcome = world.run(
        THREADS.format(number=2)
        + """
import diffusers_quantfix
together(["lib.one"], ["lib.two"])
diffusers_quantfix.apply()
import lib.one, lib.two
tell(both=[lib.one.f(), lib.two.f()], states=states("fix-one", "fix-two"))
"""
    )
    assert outcome.told == {"both": ["patched", "patched"], "states": ["applied", "applied"]}


def test_a_patch_may_import_another_target(world) -> None:
    world.library(one=SLOW, two=SLOW)
    world.fix("fix-one", "lib.one", body=COUNTING.replace("time.sleep(0.1)", "import lib.two"))
    world.fix("fix-two", "lib.two", body=COUNTING)
    outcome = world.run("""
        import sys, diffusers_quantfix, lib.one, lib.two
        tell(both=[lib.one.f(), lib.two.f()], patches=sys.patches)
    """)
    assert outcome.told == {"both": ["patched", "patched"], "patches": ["lib.one", "lib.two"]}


def test_a_fix_that_reloads_its_own_target_ends(world) -> None:
    world.library(one=SLOW)
    body = COUNTING.replace("time.sleep(0.1)", "import importlib; importlib.reload(module)")
    world.fix("fix-one", "lib.one", body=body)
    outcome = world.run("""
        import sys, diffusers_quantfix, lib.one
        tell(f=lib.one.f(), patches=len(sys.patches), state=states("fix-one"))
    """)
    assert (outcome["f"], outcome["state"]) == ("patched", "applied")
    assert outcome["patches"] <= 3


def test_a_target_that_arrives_while_another_thread_asks_its_fix(world) -> None:
    """`apply` in one thread is in the probe when the other thread executes the target anew: both see it patched."""
    world.library(one=SLOW.replace("time.sleep(0.1)", ""))
    body = """
        import sys, threading, time
        sys.inside, sys.reloaded = threading.Event(), threading.Event()
        def broken(module):
            answer = module.f() == "broken"
            if threading.current_thread().name == "asker" and not sys.inside.is_set():
                sys.inside.set()
                sys.reloaded.wait(10)
            return answer
        def patch(module, ledger):
            ledger.wrap_plain(module, "f", lambda original: lambda: "patched")
    """
    world.fix("fix-one", "lib.one", body=body)
    outcome = world.run("""
        import importlib, sys, threading, diffusers_quantfix, lib.one
        asker = threading.Thread(target=diffusers_quantfix.apply, name="asker")
        asker.start()
        sys.inside.wait(10)
        importlib.reload(lib.one)
        sys.reloaded.set()
        asker.join()
        tell(f=lib.one.f(), state=states("fix-one"))
    """)
    assert outcome.told == {"f": "patched", "state": "applied"}


def test_importing_us_in_many_threads_while_targets_arrive(world) -> None:
    world.library(one=SLOW, two=SLOW)
    world.fix("fix-one", "lib.one", body=COUNTING)
    world.fix("fix-two", "lib.two", body=COUNTING)
    outcome = world.run("""
        import importlib, sys, threading
        names = ["diffusers_quantfix", "lib.one", "lib.two"] * 3
        threads = [threading.Thread(target=importlib.import_module, args=(name,)) for name in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        import diffusers_quantfix, lib.one, lib.two
        tell(states=[diffusers_quantfix.status()[name].state for name in ("fix-one", "fix-two")],
             both=[lib.one.f(), lib.two.f()], patches=sorted(sys.patches),
             finders=sum(type(finder).__name__ == "Watcher" for finder in sys.meta_path))
    """)
    assert outcome["states"] == ["applied", "applied"]
    assert outcome["both"] == ["patched", "patched"]
    assert outcome["patches"] == ["lib.one", "lib.two"]
    assert outcome["finders"] == 1


# Its probe does not mind what another fix has written; its patch lets another thread go on in the middle.
SLOW_FIX = """
import sys, threading
def broken(module):
    return not module.f().startswith("slow")
def patch(module, ledger):
    def make(original):
        def slow():
            return "slow " + original()
        return slow
    ledger.wrap_plain(module, "f", make)
    if hasattr(sys, "middle"):
        sys.middle.set()
        sys.reverted.wait(1)
"""


def test_revert_waits_for_an_apply_of_another_thread(world) -> None:
    """It removed what the other was about to build upon: that stayed, and could not be removed any more."""
    world.library()
    world.fix()
    world.fix("fix-slow", body=SLOW_FIX)
    outcome = world.run("""
        import sys, threading, diffusers_quantfix as qf, lib.core
        before = lib.core.f()
        qf.revert()
        sys.middle, sys.reverted = threading.Event(), threading.Event()
        thread = threading.Thread(target=qf.apply)
        thread.start()
        sys.middle.wait(20)
        qf.revert()
        sys.reverted.set()
        thread.join()
        last = lib.core.f(), states("fix-f", "fix-slow")
        qf.apply()
        tell(before=before, last=last, again=lib.core.f())
    """)
    assert outcome["before"] == outcome["again"] == "slow patched"
    assert outcome["last"] == ["broken", ["disabled", "disabled"]]


def test_an_interruption_leaves_no_fix_busy(world) -> None:
    """It could never be installed again, and said "call apply()" to that."""
    world.library()
    world.fix()
    outcome = world.run("""
        import diffusers_quantfix as qf, lib.core
        from diffusers_quantfix.process_runner import RUNNER
        class Interrupted(dict):
            def __setitem__(self, key, value):
                RUNNER._answers = dict(self)
                raise KeyboardInterrupt
        qf.revert()
        RUNNER._answers = Interrupted(RUNNER._answers)
        try:
            qf.apply()
        except KeyboardInterrupt:
            qf.revert()
            qf.apply()
        tell(state=states("fix-f"), f=lib.core.f())
    """)
    assert outcome.told == {"state": "applied", "f": "patched"}


def test_a_tool_used_first_while_another_thread_imports_the_first_library(world) -> None:
    """Each waited for the other: for a module's import lock, and for the lock that is held while finders are asked."""
    world.library()
    world.fix()
    outcome = world.run("""
        import sys, threading, time
        import diffusers_quantfix
        reached = threading.Event()
        def slow(event, args):
            if event == "exec" and threading.current_thread() is user and "activation" in args[0].co_filename:
                reached.set()
                time.sleep(0.3)
        sys.addaudithook(slow)
        user = threading.Thread(target=lambda: diffusers_quantfix.status, daemon=True)
        user.start()
        assert reached.wait(10)
        import lib.core
        user.join()
        tell(f=lib.core.f(), state=states("fix-f"))
    """)
    assert outcome.told == {"f": "patched", "state": "applied"}


ONE_SLOT = """
import sys, threading
def broken(module):
    import lib.core
    return "{name}" not in lib.core.f()
def patch(module, ledger):
    import lib.core
    ledger.wrap_plain(lib.core, "f", lambda original: lambda: original() + " {name}")
    if "{name}" not in sys.waited:
        sys.waited.add("{name}")
        sys.barrier.wait(20)
"""


def test_two_fixes_that_patch_one_slot_at_once(world) -> None:
    """The second one was written over the first, which said "applied"."""
    world.library(core="def f(): return 'broken'", one="", two="")
    for name in ("one", "two"):
        world.fix(f"fix-{name}", f"lib.{name}", body=ONE_SLOT.format(name=name))
    outcome = world.run("""
        import importlib, sys, threading, lib.core, diffusers_quantfix as qf
        sys.waited, sys.barrier = set(), threading.Barrier(2)
        threads = [threading.Thread(target=importlib.import_module, args=(f"lib.{name}",)) for name in ("one", "two")]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        tell(f=sorted(lib.core.f().split()), states=states("fix-one", "fix-two"))
        qf.revert()
        tell(reverted=lib.core.f())
    """)
    assert outcome.told == {
        "f": ["broken", "one", "two"],
        "states": ["applied", "applied"],
        "reverted": "broken",
    }
