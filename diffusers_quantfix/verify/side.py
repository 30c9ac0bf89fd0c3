"""One of the two processes of `verify`: given cases, watched, and replaced when a case kills it or never ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from ..engine.settings import VARIABLE
from ..text import process_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Event = dict[str, Any]

# Seconds of `Side._clock`, which do not count while other processes have the processors.
CASE_LIMIT = 120.0  # for one case: a hang must not look like work
START_LIMIT = 300.0  # for the imports, which a cold disk makes slow
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Not "-m" alone: a program may have put the folder or archive of this package on sys.path itself, a zipapp does.
PROGRAM = (
    sys.executable,
    "-c",
    f"import runpy, sys; sys.path[:0] = [{_HOME!r}] * ({_HOME!r} not in sys.path); "
    f"runpy.run_module({f'{__package__}.child'!r}, run_name='__main__')",
)


class Side:
    """The cases of one side, in one process after the other.

    Args:
        setting: the value of ``DIFFUSERS_QUANTFIX`` there; None keeps the user's value.
        work: a folder that does not exist yet.
        step: called with the number of cases that have ended.
        ids: the fixes that will be asked for, all of them when empty: only their libraries are imported.
        program: what runs the cases.

    Attributes:
        board: the result of `status` in the process; None until it is reported, and for ``off``.
        without: why the rig is not there although ``program`` has it; empty where it is.
        found: id -> the last event of its case.
        current: the id of the case that is running.
    """

    def __init__(
        self,
        setting: str | None,
        work: str,
        step: Callable[[int], object],
        ids: Iterable[str] = (),
        program: Iterable[str] = PROGRAM,
    ) -> None:
        os.makedirs(work)
        self.board: Event | None = None
        self.without = ""
        self.found: dict[str, Event] = {}
        self.current = ""
        self._work = work
        self._results = os.path.join(work, "results.jsonl")
        self._log = os.path.join(work, "log")
        self._step = step
        self._ids = tuple(ids)
        self._program = tuple(program)
        # One thread: tiny models, and the same order of every sum in both processes. The cases assert.
        self._environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONOPTIMIZE": "",
        }  # fmt: skip
        if setting is not None:
            self._environment[VARIABLE] = setting
        self._pending: list[str] | None = None
        self._read = 0
        self.ready = False
        self._start()

    def give(self, ids: Iterable[str]) -> None:
        """Run these cases, in this order."""
        self._pending = list(ids)
        self._send()

    @property
    def busy(self) -> bool:
        """Whether the start or cases are still pending."""
        return not self.ready if self._pending is None else bool(self._pending)

    def owes(self, fix_id: str) -> bool:
        """Whether the result of this case is still pending."""
        return self._pending is None or fix_id in self._pending

    def pump(self) -> None:
        """Read the events since the last call; replace a process that has died or hangs."""
        code: int | str | None = self._child.poll()
        if code is None and self._clock() > self._deadline:
            self._child.kill()
            self._child.wait()
            limit = CASE_LIMIT if self.ready else START_LIMIT
            code = f"timed out after {limit:.0f} s"
        self._take()
        if code is None or not self.busy:
            return
        why = code if isinstance(code, str) else process_end(code)
        if self._pending is None:
            raise RuntimeError(f"the libraries could not be imported: {why}{self._last_words()}")
        event = "timed out" if isinstance(code, str) else "defect"
        if not self.current and self._lost:  # died twice before any case: it will not work
            self._lose(self._pending, why, event)
            return
        if self.current:
            self._lose([self.current], why, event)
        else:
            self._lost = True
        if self._pending:
            self._start()
            self._send()

    def end(self) -> None:
        """End the process, even if it is busy."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        if self._child.stdin:
            self._child.stdin.close()

    _lost = False

    def _start(self) -> None:
        self.ready, self.current = False, ""
        with open(self._log, "ab") as log:
            self._child = subprocess.Popen(
                self._command(), env=self._environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
            )  # fmt: skip
        self._deadline = self._clock() + START_LIMIT

    def _clock(self) -> float:
        """Seconds, without those in which the process was ready to run and others ran: a busy machine is no hang."""
        return time.monotonic() - _waited(self._child.pid)

    def _command(self) -> list[str]:
        return [*self._program, self._results, self._work, *self._ids]

    def _send(self) -> None:
        stdin = self._child.stdin
        assert stdin is not None
        try:
            stdin.write((" ".join(self._pending or ()) + "\n").encode())
            stdin.close()
        except OSError:
            pass  # it is dead already: `pump` finds out

    def _take(self) -> None:
        """The complete lines of the results file that were not there at the last call."""
        if not os.path.exists(self._results):
            return
        with open(self._results, "rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._hear(json.loads(line))

    def _hear(self, event: Event) -> None:
        self._deadline = self._clock() + CASE_LIMIT
        if event["event"] == "ready":
            self.ready, self.without = True, event.get("without", "")
            self.board = event.get("board", self.board)
            return
        self.found[event["id"]] = event
        if event["event"] == "begin":
            self.current = event["id"]
        else:
            self._done(event["id"])

    def _lose(self, ids: list[str], why: str, event: str) -> None:
        for fix_id in list(ids):
            self.found[fix_id] = {"id": fix_id, "event": event, "text": why}
            self._done(fix_id)

    def _done(self, fix_id: str) -> None:
        self.current = ""
        if self._pending and fix_id in self._pending:
            self._pending.remove(fix_id)
            self._step(1)

    def _last_words(self) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as log:
            lines = log.read().strip().splitlines()
        return f" ({lines[-1].strip()})" if lines else ""


def _waited(pid: int) -> float:
    """Seconds that a process has waited for a processor; 0 where the system does not tell (Linux does)."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
