"""One of the two processes of `verify`: it gets cases, is watched, and is replaced if a case kills it or hangs."""

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

# Seconds of `Side._clock`, which stops while other processes use the processors.
CASE_LIMIT = 120.0  # for one case: a hang must not look like work
START_LIMIT = 300.0  # for the imports, which are slow from a cold disk
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Not "-m" alone: the program (a zipapp, for example) may have put this package's folder or archive on sys.path itself.
PROGRAM = (
    sys.executable,
    "-c",
    f"import runpy, sys; sys.path[:0] = [{_HOME!r}] * ({_HOME!r} not in sys.path); "
    f"runpy.run_module({f'{__package__}.child'!r}, run_name='__main__')",
)


class Side:
    """Runs the cases of one side, in one process after another.

    Args:
        setting: the value of ``DIFFUSERS_QUANTFIX`` there; None keeps the user's value.
        work: a folder that does not exist yet.
        step: called with the number of cases that have ended.
        ids: the fixes to verify, all if empty: only their libraries are imported.
        program: the command that runs the cases.

    Attributes:
        board: the result of `status` in the process; None until it is reported, and for ``off``.
        without: why there is no rig although ``program`` should have it; "" if there is one.
        found: id -> the last event of its case.
        current: the id of the running case.
        ready: whether the process has imported the libraries.
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
        event = "timed out" if isinstance(code, str) else "bug"
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
        """Seconds, without the time that the process waited for a processor: a busy machine is not a hang."""
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
            pass  # the process is dead: `pump` handles that

    def _take(self) -> None:
        """Process the complete lines of the results file that were added since the last call."""
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
        self.current, self._lost = "", False
        if self._pending and fix_id in self._pending:
            self._pending.remove(fix_id)
            self._step(1)

    def _last_words(self) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as log:
            lines = log.read().strip().splitlines()
        return f" ({lines[-1].strip()})" if lines else ""


def _waited(pid: int) -> float:
    """Seconds that a process has waited for a processor; 0 if the system does not report it (Linux does)."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
