"""Ctrl-C in the middle of `revert` and `apply`, at every thirteenth line of our code that they run.

A child is forked for each. Afterwards the board says what is true, and both can be called again.
"""

from __future__ import annotations

import os

import pytest

from tests.marks import rest_is_long

from .harness import ROOT

LIBRARY = """
def f(x=0):
    return "broken"
def g():
    return "broken"
class C:
    def m(self):
        return "broken"
class D(C):
    pass
"""

TWO_SLOTS = """
def broken(module):
    return module.g() == "broken"
def patch(module, draft):
    draft.wrap_plain(module, "g", lambda original: lambda: "patched")
    draft.wrap_plain(module.D, "m", lambda original: lambda self: "patched")
"""

OVER = """
def broken(module):
    return "over" not in module.f()
def patch(module, draft):
    draft.wrap_plain(module, "f", lambda original: lambda: original() + " over")
"""

SCRIPT = """
    import json, linecache, os, sys, traceback, warnings
    import diffusers_quantfix as qf
    warnings.simplefilter("ignore")
    import lib.core
    import lib.copy
    qf.revert()
    bare = lib.core.f, lib.core.g, lib.core.C.m, lib.copy.f, lib.copy.g
    qf.apply()
    ids = ["fix-f", "fix-g", "fix-over"]
    PATCHED = ["patched over", "patched", "patched", "patched over", "patched"]
    BARE = ["broken", "broken", "broken", "broken", "broken"]
    def behaviour():
        return [lib.core.f(), lib.core.g(), lib.core.D().m(), lib.copy.f(), lib.copy.g()]
    assert behaviour() == PATCHED, behaviour()

    class Stop(KeyboardInterrupt):
        pass
    def line_of(frame):
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    def lines_of(work, stop_at):
        count = 0
        def local(frame, event, argument):
            nonlocal count
            # On leaving a block, Python handles no signal between the end of the block and the release of its lock, and
            # none at ``try:``. What a trace function raises there, or in a comprehension from 3.12 on, escapes the
            # handlers around it; an error of a signal handler does not.
            line = line_of(frame)
            if event == "line" and not line.startswith(("with ", "try:")) and " for " not in line:
                count += 1
                if count == stop_at:
                    raise Stop
            return local
        def start(frame, event, argument):
            here = frame.f_code.co_filename
            return local if {root!r} in here and "/tests/" not in here else None
        sys.settrace(start)
        try:
            work()
        except Stop:
            return -1
        finally:
            sys.settrace(None)
        return count
    def true_states(now):
        return {{"fix-f": "patched" in now[0], "fix-over": "over" in now[0], "fix-g": now[1] == "patched"}}
    def problems():
        found = []
        said = states(*ids)  # it installs what an interrupted `apply` has not
        now = behaviour()
        truth = true_states(now)
        if (now[1] == "patched") != (now[2] == "patched"):
            found.append(f"half of fix-g: {{now}}")
        if now[0] != now[3] or now[1] != now[4]:
            found.append(f"copies differ: {{now}}")
        for fix_id, state in zip(ids, said):
            if (state == "applied") != truth[fix_id]:
                found.append(f"{{fix_id}} is {{state}}, but {{now}}: {{reason(fix_id)}}")
        return found
    work = {{"revert": qf.revert, "one": lambda: qf.revert("fix-f"), "apply": qf.apply}}["{work}"]
    if "{work}" == "apply":
        qf.revert()
    def in_a_child(job):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                told = job()
            except BaseException:
                told = [traceback.format_exc()[-700:]]
            os.write(write, json.dumps(told).encode())
            os._exit(0)
        os.close(write)
        with open(read) as file:
            told = json.loads(file.read())
        os.waitpid(child, 0)
        return told
    def interrupted(line):
        if lines_of(work, line) != -1:
            return []
        found = problems()
        for again in (qf.revert, qf.apply, qf.revert):
            again()
            found += [again.__name__ + " again: " + one for one in problems()]
            if behaviour() != (PATCHED if again is qf.apply else BARE):
                found.append(f"{{again.__name__}} again: {{behaviour()}}")
        if (lib.core.f, lib.core.g, lib.core.C.m, lib.copy.f, lib.copy.g) != bare or "m" in vars(lib.core.D):
            found.append("revert leaves something")
        return found
    total = in_a_child(lambda: lines_of(work, -1))
    told = {{line: found for line in range(1, total, 13) if (found := in_a_child(lambda: interrupted(line)))}}
    tell(told=told, total=total)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("work", rest_is_long(["revert", "one", "apply"], "revert"))
def test_it_says_what_is_true_and_can_be_called_again(world, work) -> None:
    world.library(core=LIBRARY, copy="from lib.core import f, g\n")
    world.fix()
    world.fix("fix-g", body=TWO_SLOTS)
    world.fix("fix-over", body=OVER)
    outcome = world.run(SCRIPT.format(root=str(ROOT / "diffusers_quantfix"), work=work), timeout=300)
    assert outcome["total"] > 500
    assert outcome["told"] == {}
