"""Child processes, several copies of the package, and the end of the interpreter."""

from __future__ import annotations

import textwrap

import pytest

from .harness import PATCH, PROBE


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(simple, method) -> None:
    (simple.site / "work.py").write_text(
        "def work(activate):\n"
        "    import sys\n"
        "    before = 'diffusers_quantfix' in sys.modules\n"
        "    if activate:\n"
        "        import diffusers_quantfix\n"
        "    import lib.core\n"
        "    return [before, lib.core.f(), sum(type(finder).__name__ == 'Watcher' for finder in sys.meta_path)]\n"
    )
    outcome = simple.run(f"""
        if __name__ == "__main__":
            import multiprocessing, diffusers_quantfix, lib.core, work
            context = multiprocessing.get_context({method!r})
            with context.Pool(1) as pool:
                answers = [pool.apply(work.work, (activate,)) for activate in (False, True)]
            tell(answers=answers, f=lib.core.f())
    """)
    inherits = method == "fork"
    assert outcome["answers"] == [
        [inherits, "patched" if inherits else "broken", int(inherits)],
        [inherits, "patched", 1],
    ]
    assert outcome["f"] == "patched"


def test_a_subprocess_inherits_the_settings_and_nothing_else(simple) -> None:
    outcome = simple.run(
        """
        import subprocess, sys, diffusers_quantfix, lib.core
        code = ("import sys, os, lib.core; print('diffusers_quantfix' in sys.modules, lib.core.f(),"
                "os.environ['DIFFUSERS_QUANTFIX'])")
        tell(child=subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())
    """,
        "debug",
    )
    assert outcome["child"] == ["False", "broken", "debug"]


def test_a_fork_while_another_thread_is_busy(world) -> None:
    world.library(core="def f(): return 'broken'", slow="def f(): return 'broken'")
    world.fix()
    body = """
        import os, sys
        def broken(m): return m.f() == "broken"
        def patch(m, ledger):
            if os.getpid() == sys.parent:
                sys.entered.set()
                sys.leave.wait(10)
            ledger.wrap_plain(m, "f", lambda original: lambda: "patched")
    """
    world.fix("slow", target="lib.slow", body=body)
    outcome = world.run("""
        import os, sys, threading, warnings, diffusers_quantfix as qf, lib.core
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks with threads
        sys.parent, sys.entered, sys.leave = os.getpid(), threading.Event(), threading.Event()
        thread = threading.Thread(target=__import__, args=("lib.slow",))
        thread.start()
        sys.entered.wait(10)
        reading, writing = os.pipe()
        if not os.fork():
            import signal
            signal.alarm(10)
            sys.modules.pop("lib.slow")
            import importlib.machinery
            spec = importlib.machinery.PathFinder.find_spec("lib.slow", sys.modules["lib"].__path__)
            slow = importlib.util.module_from_spec(spec)
            sys.modules["lib.slow"] = slow
            spec.loader.exec_module(slow)
            answer = qf.apply("slow")["slow"].state + " " + slow.f()
            qf.revert()
            os.write(writing, answer.encode())
            os._exit(0)
        os.close(writing)
        child = open(reading).read()
        sys.leave.set()
        thread.join()
        tell(child=child, parent=sys.modules["lib.slow"].f())
    """)
    assert outcome.told == {"child": "applied patched", "parent": "patched"}


FORGET = """
def forget(whole):
    import sys
    fakes = sys.modules["diffusers_quantfix.fixes"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "diffusers_quantfix"]:
        if whole or (name == "diffusers_quantfix") == (whole is False):
            del sys.modules[name]
    sys.modules["diffusers_quantfix.fixes"] = fakes
    wait_for_the_fakes()
"""


@pytest.mark.parametrize("whole", [True, False], ids=["every module", "the package"])
@pytest.mark.parametrize("target", ["first", "last"])
def test_deleted_from_sys_modules_and_imported_again(simple, whole, target) -> None:
    """The second copy takes over: the first one's work is taken back, and its watcher goes."""
    (simple.site / "lib" / "second.py").write_text("def f(): return 'broken'\n")
    simple.fix("fix-second", target="lib.second")
    script = f"""
        import sys
        import diffusers_quantfix as one
        if {target == "first"}:
            import lib.core
        for _ in range(2):
            forget({whole})
            import diffusers_quantfix as two
            import lib.core
        import lib.second
        core = lib.core
        patched = [core.f(), lib.second.f()]
        states = [answer.state for answer in two.status()]
        finders = sum(type(finder).__name__ == "Watcher" for finder in sys.meta_path)
        two.revert()
        tell(patched=patched, states=states, finders=finders, other=one is not two, back=core.f is core.KEPT[0])
    """
    outcome = simple.run(FORGET + textwrap.dedent(script))
    assert outcome.told == {
        "patched": ["patched", "patched"],
        "states": ["applied", "applied"],
        "finders": 1,
        "other": True,
        "back": True,
    }


def test_status_of_a_copy_that_was_deleted_and_replaced(simple) -> None:
    """The first copy had not patched anything: it found the second one's runner, and reverted that."""
    script = """
        import sys
        from diffusers_quantfix import status as one
        forget(True)
        from diffusers_quantfix import status as two
        import lib.core
        states = [status(load=False)["fix-f"].state for status in (one, two)]
        tell(states=states, patched=lib.core.f())
    """
    outcome = simple.run(FORGET + textwrap.dedent(script), "claimed")
    assert outcome.told == {"states": ["applied", "applied"], "patched": "patched"}


@pytest.mark.parametrize("first", ["revert", "status"])
def test_only_our_modules_deleted_from_sys_modules(simple, first) -> None:
    """The package that stays imports the second copy, whose `revert` did not know the first copy's patches."""
    script = f"""
        import sys, lib.core, diffusers_quantfix as qf
        forget(None)
        if {first == "status"}:
            state = qf.status()["fix-f"].state, lib.core.f()
            assert state == ("applied", "patched"), state
        qf.revert()
        back = lib.core.f is lib.core.KEPT[0]
        left = sum(type(finder).__name__ == "Watcher" for finder in sys.meta_path)
        qf.apply()
        finders = sum(type(finder).__name__ == "Watcher" for finder in sys.meta_path)
        tell(back=back, left=left, finders=finders, patched=lib.core.f())
    """
    outcome = simple.run(FORGET + textwrap.dedent(script))
    assert outcome.told == {"back": True, "left": 0, "finders": 1, "patched": "patched"}


def test_reloads_of_our_modules(simple) -> None:
    outcome = simple.run("""
        import importlib, sys, diffusers_quantfix as qf, lib.core
        importlib.reload(qf)
        importlib.reload(sys.modules["diffusers_quantfix.activation"])
        importlib.reload(qf)
        importlib.reload(lib.core)
        values = lib.core.f(), states("fix-f"), sum(type(finder).__name__ == "Watcher" for finder in sys.meta_path)
        qf.revert()
        tell(values=values, back=lib.core.f is lib.core.KEPT[0])
    """)
    assert outcome.told == {"values": ["patched", "applied", 1], "back": True}


def test_a_target_imported_at_the_end_of_the_interpreter(simple) -> None:
    outcome = simple.run("""
        import atexit, diffusers_quantfix
        class Late:
            def __del__(self):
                try:
                    import lib.core
                    tell(f=lib.core.f())
                except ImportError:  # too late for any import
                    tell(f="gone")
        def last():
            import lib.core
            tell(at_exit=lib.core.f())
        atexit.register(last)
        late = Late()
    """)
    assert outcome["at_exit"] == "patched"
    assert "diffusers_quantfix" not in outcome.err


def test_a_fork_while_another_thread_imports_a_module_of_ours(world) -> None:
    """At each of them, and at a module that one of them imports: before, the child waited without end."""
    world.library()
    world.library("other")
    world.fix(body="import helper\n" + PROBE + PATCH)
    world.fix("other-f", target="other.core")
    (world.site / "helper.py").write_text("")
    outcome = world.run(
        """
        import _imp, os, sys, threading, warnings
        import diffusers_quantfix
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks with threads
        reached, go_on, done = threading.Semaphore(0), threading.Semaphore(0), []
        class Stops:
            def __init__(self, loader): self.loader = loader
            def __getattr__(self, name): return getattr(self.loader, name)
            def create_module(self, spec): return self.loader.create_module(spec)
            def exec_module(self, module):
                self.loader.exec_module(module)
                # Inside a finder the process cannot fork: `os.fork` waits for the lock of all searches.
                if threading.current_thread() is thread and not _imp.lock_held():
                    done.append(module.__name__)
                    reached.release()
                    go_on.acquire()
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if not name.startswith("diffusers_quantfix.") and name != "helper":
                    return None
                spec = sys.modules["_frozen_importlib_external"].PathFinder.find_spec(name, path)
                spec.loader = Stops(spec.loader)
                return spec
        sys.meta_path.insert(0, Finder())
        def work():
            import lib.core
            done.append("")
            reached.release()
        thread = threading.Thread(target=work)
        thread.start()
        told = {}
        while True:
            reached.acquire()
            if not done[-1]:
                break
            child = os.fork()
            if not child:
                import faulthandler
                faulthandler.dump_traceback_later(5, exit=True)
                import other.core
                os._exit(0 if other.core.f() == "patched" else 3)
            told[done[-1]] = os.waitpid(child, 0)[1]
            go_on.release()
        thread.join()
        tell(told=told, f=sys.modules["lib.core"].f())
    """,
        timeout=120,
    )
    told = outcome["told"]
    assert outcome["f"] == "patched"
    assert {"diffusers_quantfix.engine.runner", "diffusers_quantfix.fixes.fix_f", "helper"} <= set(told)
    assert len(told) > 20
    assert not {name: status for name, status in told.items() if status}, outcome.err


def test_a_fork_while_another_threads_probe_imports(world) -> None:
    """No module of ours is being imported then, but what the probe imports is imported for us alone."""
    world.library()
    world.library("other")
    inside = "    import helper\n    return module.f()"
    world.fix(body=PROBE.replace("    return module.f()", inside) + PATCH)
    world.fix("other-f", target="other.core", body=PROBE.replace("    return module.f()", inside) + PATCH)
    (world.site / "helper.py").write_text("import sys\nsys.in_the_helper()\n")
    outcome = world.run(
        """
        import os, sys, threading, warnings
        import diffusers_quantfix
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks with threads
        reached, go_on = threading.Semaphore(0), threading.Semaphore(0)
        def in_the_helper():
            if threading.current_thread() is thread:
                reached.release()
                go_on.acquire()
        sys.in_the_helper = in_the_helper
        def work():
            import lib.core
        thread = threading.Thread(target=work)
        thread.start()
        reached.acquire()
        child = os.fork()
        if not child:
            import faulthandler
            faulthandler.dump_traceback_later(5, exit=True)
            import helper
            import other.core
            os._exit(0 if other.core.f() == "patched" else 3)
        status = os.waitpid(child, 0)[1]
        go_on.release()
        thread.join()
        tell(status=status, f=sys.modules["lib.core"].f())
    """
    )
    assert outcome.told == {"status": 0, "f": "patched"}, outcome.err
