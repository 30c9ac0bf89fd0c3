"""``from x import f``: copies in modules of the same library follow, both ways; other people's names do not."""

from __future__ import annotations

LIBRARY = {
    "core": """
        def f(): return "broken"
        def fast(): return "patched"
        LIMIT = 5
        KEPT = [f]
        same = f
    """,
    "early": "from lib.core import f, LIMIT\nfrom lib.core import f as g",
    "late": "from lib.core import f\nfrom lib.core import f as g\nfrom lib.core import fast",
    "holder": "from lib.core import f\nlazily = None",
    "other": "def f(): return 'another f'\nLIMIT = 5",
}


def test_copies_before_us_after_us_and_after_revert(world) -> None:
    world.library(**LIBRARY)
    world.fix()
    (world.site / "program.py").write_text("from lib.core import f")
    outcome = world.run("""
        import lib.core, lib.early, lib.other, program
        import diffusers_quantfix as qf
        core, early = lib.core, lib.early
        import lib.late
        late = lib.late
        patched = [core.f(), core.same(), early.f(), early.g(), late.f(), late.g()]
        others = lib.other.f(), program.f(), lib.other.LIMIT
        changes = qf.status()["fix-f"].changes
        qf.revert()
        back = [m.f is core.KEPT[0] for m in (core, early, late, program)]
        back += [early.g is core.KEPT[0], late.g is core.KEPT[0], core.same is core.KEPT[0]]
        import lib.holder
        qf.apply()
        again = [core.f(), early.f(), late.f(), lib.holder.f()]
        qf.revert()
        tell(patched=patched, others=others, back=back, again=again, changes=changes,
             last=[m.f is core.KEPT[0] for m in (core, early, late, lib.holder)])
    """)
    assert outcome["patched"] == ["patched"] * 6
    assert outcome["others"] == ["another f", "broken", 5], "a program's own name is its own"
    assert outcome["changes"] == ["lib.core.f", "lib.core.same", "lib.early.f", "lib.early.g"]
    assert all(outcome["back"])
    assert outcome["again"] == ["patched"] * 4
    assert all(outcome["last"])


def test_a_replacement_by_something_that_others_hold_too(world) -> None:
    """Undo gives back copies of ours only: the library's own ``fast`` was there before."""
    body = """
        def broken(core): return core.f() == "broken"
        def patch(core, ledger): ledger.replace(core, "f", core.fast)
    """
    world.library(**LIBRARY)
    world.fix(body=body)
    outcome = world.run("""
        import lib.early, lib.late, diffusers_quantfix as qf
        core = lib.core
        patched = core.f(), lib.early.f(), lib.late.f()
        qf.revert()
        tell(patched=patched, f=[core.f(), lib.early.f(), lib.late.f()], fast=[core.fast(), lib.late.fast()])
    """)
    assert outcome.told == {"patched": ["patched"] * 3, "f": ["broken"] * 3, "fast": ["patched"] * 2}


def test_a_slot_in_a_module_that_only_imported_the_function_means_that_slot(world) -> None:
    world.library(**LIBRARY)
    world.fix(target="lib.holder")
    outcome = world.run("""
        import lib.early, lib.holder, diffusers_quantfix as qf
        patched = [lib.holder.f(), lib.core.f(), lib.early.f()]
        qf.revert()
        tell(patched=patched, back=lib.holder.f is lib.core.f)
    """)
    assert outcome.told == {"patched": ["patched", "broken", "broken"], "back": True}


def test_constants_are_no_copies(world) -> None:
    body = """
        def broken(core): return core.LIMIT == 5
        def patch(core, ledger): ledger.replace(core, "LIMIT", 6)
    """
    world.library(**LIBRARY)
    world.fix(body=body)
    outcome = world.run("""
        import lib.early, lib.other, diffusers_quantfix as qf
        tell(limits=[lib.core.LIMIT, lib.early.LIMIT, lib.other.LIMIT], back=qf.revert() and lib.core.LIMIT)
    """)
    assert outcome.told == {"limits": [6, 5, 5], "back": 5}


def test_a_copy_that_is_gone_or_used_otherwise_does_not_stop_the_way_back(world) -> None:
    world.library(**LIBRARY)
    world.fix()
    outcome = world.run("""
        import lib.early, lib.late, diffusers_quantfix as qf
        del lib.early.f
        lib.early.g = None
        lib.late.f = len
        before = states("fix-f")
        tell(before=before, after=qf.revert()["fix-f"].state,
             left=[lib.early.g, lib.late.f is len, hasattr(lib.early, "f")],
             f=lib.core.f is lib.core.KEPT[0])
    """)
    assert outcome.told == {"before": "applied", "after": "disabled", "left": [None, True, False], "f": True}


def test_fixes_on_one_function_come_and_go_in_any_order(world) -> None:
    world.library(
        core="""
        def f(): return ()
        KEPT = [f]
    """,
        user="from lib.core import f",
    )
    for name in "abc":
        world.fix(
            f"fix-{name}",
            body=f"""
            def broken(core): return {name!r} not in core.f()
            def patch(core, ledger):
                ledger.wrap_plain(core, "f", lambda original: lambda: (*original(), {name!r}))
        """,
        )
    outcome = world.run("""
        import itertools, diffusers_quantfix as qf, lib.user
        core, faults = lib.core, []
        names = ["fix-a", "fix-b", "fix-c"]
        for going in itertools.permutations(names):
            there = set(names)
            for step in (qf.revert, qf.apply):
                for name in going:
                    board = step(name)
                    (there.discard if step is qf.revert else there.add)(name)
                    seen = {"fix-" + letter for letter in core.f()}
                    copied = {"fix-" + letter for letter in lib.user.f()}
                    stated = {answer.id for answer in board if answer.state == "applied"}
                    if not (seen == copied == stated == there) or len(core.f()) != len(there):
                        faults.append([going, step.__name__, name, core.f(), lib.user.f(), sorted(stated)])
                if step is qf.revert and core.f is not core.KEPT[0]:
                    faults.append([going, "not the original"])
        tell(faults=faults)
    """)
    assert outcome["faults"] == []


def test_a_copy_in_a_module_that_the_target_imports_itself(world) -> None:
    """While the target is being imported the modules before it cannot have its functions; those after it can."""
    world.library(
        before="import sys\n" + "there = True",
        core="from . import before\ndef f(): return 'broken'\nfrom . import child",
        child="from .core import f",
    )
    world.fix()
    outcome = world.run("""
        import diffusers_quantfix as qf
        import lib.before, lib.core
        patched = [lib.core.f(), lib.core.child.f()]
        qf.revert()
        tell(patched=patched, back=[lib.core.f(), lib.core.child.f()])
    """)
    assert outcome.told == {"patched": ["patched"] * 2, "back": ["broken"] * 2}


def test_a_replacement_that_an_earlier_module_holds(world) -> None:
    """It is no copy of ours, although the slot is that of a module that is being imported."""
    world.library(
        tools="def fast(): return 'patched'",
        user="from .tools import fast",
        core="def f(): return 'broken'",
    )
    world.fix(
        body="""
        def broken(core): return core.f() == "broken"
        def patch(core, ledger):
            import lib.tools
            ledger.replace(core, "f", lib.tools.fast)
    """
    )
    outcome = world.run("""
        import diffusers_quantfix as qf
        import lib.user, lib.core
        patched = lib.core.f()
        qf.revert()
        tell(patched=patched, left=[lib.core.f(), lib.tools.fast(), lib.user.fast()])
    """)
    assert outcome.told == {"patched": "patched", "left": ["broken", "patched", "patched"]}


def test_another_thread_imports_meanwhile(world) -> None:
    """A garbage collection, which the tuples of a list of items may start, lets other threads run."""
    world.library(**LIBRARY)
    world.fix()
    outcome = world.run("""
        import gc, sys, types
        import diffusers_quantfix as qf
        import lib.core

        class Cycle:
            def __init__(self):
                self.me = self
            def __del__(self):  # in place of a thread that imports
                name = f"meanwhile{len(sys.modules)}"
                sys.modules[name] = types.ModuleType(name)

        qf.revert("fix-f")
        sys.modules.update({f"other{index}": types.ModuleType("other") for index in range(3000)})
        gc.set_threshold(50)
        gc.callbacks.append(lambda phase, info: Cycle() if phase == "stop" else None)
        for _ in range(20):
            Cycle()
        answers = [qf.apply("fix-f")["fix-f"].state for _ in range(3)]
        gc.callbacks.clear()
        tell(answers=answers, f=lib.core.f())
    """)
    assert outcome.told == {"answers": ["applied"] * 3, "f": "patched"}
