"""Runs a command that may hang or start processes of its own: none of them outlives it, and each says where it hung."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

_TRACEBACK_SECONDS = 20


class Hung(Exception):
    """A command ran longer than it may; the text is what its processes wrote, with their tracebacks at the end."""


def run(command: list[str], seconds: float, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess:
    """What `subprocess.run` gives, for a command in a session of its own.

    Args:
        command: the program and its arguments.
        seconds: how long it may run.
        cwd: where it runs.
        env: its environment; each Python process writes its tracebacks when it is aborted.

    Raises:
        Hung: it ran longer.
    """
    # Files, not pipes: a process that is left behind would keep a pipe open, and us waiting for its end.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        process = subprocess.Popen(
            command, cwd=cwd, env={**env, "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
        hung = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            hung = True
            _abort(process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())
    if hung:
        raise Hung(f"it ran longer than {seconds} seconds\n{done.stdout[-2000:]}\n{done.stderr[-20000:]}")
    return done


def _abort(pid: int) -> None:
    """Let a process and its descendants, in whatever session, write their tracebacks and end.

    One after the other, since they write to the same file; the parents first, which would go on if a child ended.
    """
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    until = time.monotonic() + _TRACEBACK_SECONDS
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)
        psutil.wait_procs([process], timeout=max(until - time.monotonic(), 0.1))
    for process in psutil.wait_procs(family, timeout=0)[1]:
        process.kill()
