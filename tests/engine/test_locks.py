"""Locks: a child that is forked while another thread has one finds it free."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import pytest

from tests.trees import ROOT

PROGRAM = """
import os, sys, threading
import torch, diffusers_quantfix as qf
{setup}
entered, done = threading.Event(), threading.Event()
def hold():
    with lock.held:
        entered.set()
        done.wait()
holder = threading.Thread(target=hold)
holder.start()
entered.wait()
child = os.fork()
if child == 0:
    import faulthandler
    faulthandler.dump_traceback_later(20, exit=True)
    {work}
    os._exit(0)
status = os.waitpid(child, 0)[1]
done.set()
holder.join()
print(status)
"""
KEEP = "model = torch.nn.Linear(2, 2); qf.keep_host_copies(model); del model"
RELEASE = "qf.release(torch.nn.Linear(2, 2))"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    ("module", "name", "work"),
    [("host_copies", "_lock", KEEP), ("freeing", "_one_at_a_time", RELEASE)],
    ids=["keep_host_copies", "release"],
)
def test_a_child_that_is_forked_meanwhile_does_not_wait_for_ever(module, name, work) -> None:
    """Before: `keep_host_copies`, and the end of a model that has copies, hung there."""
    pytest.importorskip("torch")
    setup = f"from diffusers_quantfix.memory.{module} import {name} as lock\n{work}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setup=setup, work=work)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout == "0\n", done.stderr


def test_who_forks_keeps_what_it_has() -> None:
    from diffusers_quantfix.engine.locks import Lock

    lock = Lock()
    with lock.held, lock.held:
        lock.after_fork()
    with lock.held:
        pass


def test_a_signal_handler_that_raises_does_not_leave_it_taken() -> None:
    """Before: `apply`, `revert` and `status` of other threads then waited ten seconds each, for ever.

    Python runs a handler when a call of C code has returned, and when a function begins.
    """
    from diffusers_quantfix.engine.locks import Lock

    class Stop(KeyboardInterrupt):
        pass

    def interrupted_at(stop_at: int) -> bool:
        lock, count = Lock(), 0
        inner = lock._lock

        def handler(frame, event, argument) -> None:
            nonlocal count
            if event in ("call", "c_return"):
                count += 1
                if count == stop_at:
                    raise Stop

        stopped = False
        sys.setprofile(handler)
        try:
            lock.run(lambda taken: len("work"), within=1)
        except Stop:
            stopped = True
        finally:
            sys.setprofile(None)
        assert not inner._is_owned(), f"interrupted at event {stop_at}"
        return stopped

    stops = 0
    while interrupted_at(stops + 1):
        stops += 1
    assert stops >= 5  # `run`, `_is_owned`, `acquire`, the work and `release`


def test_who_has_it_already_runs_the_work_and_keeps_it() -> None:
    from diffusers_quantfix.engine.locks import Lock

    lock, told = Lock(), []
    with lock.held:
        lock.run(told.append, within=0)
        assert lock._lock._is_owned()
    assert told == [True]


def test_who_waits_in_vain_works_without_it() -> None:
    from diffusers_quantfix.engine.locks import Lock

    lock, told = Lock(), []
    with lock.held:
        waiting = threading.Thread(target=lock.run, args=(told.append, 0.01))
        waiting.start()
        waiting.join()
        assert lock._lock._is_owned()
    assert told == [False]


def test_there_is_no_other_lock() -> None:
    """But those of the engine, which are made anew with what they guard."""
    made = {
        str(path.relative_to(ROOT / "diffusers_quantfix"))
        for path in (ROOT / "diffusers_quantfix").rglob("*.py")
        if re.search(r"threading\.(R?Lock|Condition|Semaphore)\(", path.read_text(encoding="utf-8"))
    }
    assert made <= {"engine/ledger.py", "engine/locks.py", "engine/runner.py"}
