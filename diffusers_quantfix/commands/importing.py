"""Commands that import libraries: progress on a terminal, and an error message where a library ends the process.

Such a command runs in a forked child, and this process stays small: it draws the progress, which the imports of the
child cannot block, and reports afterwards what was being imported if the child died.  The child writes what it imports
to shared memory, so that the name is available even if the child dies.  Where no process can be forked, the command
runs in this process, without progress and without that message.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time

from ..text import process_end
from .terminal import shows_progress, stdout_to_stderr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from mmap import mmap

# Values of the first byte of the shared memory.
_BEFORE, _IMPORTING, _READY, _SEEN, _AFTER = range(5)
_SIZE = 512
_TICK = 0.1  # seconds between two frames: the line changes within half a second
_SPINNER = "|/-\\"

_shared: mmap | None = None


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Wraps imports of libraries: their output goes to standard error, and the parent knows what is being imported."""
    with stdout_to_stderr():
        if _shared is None:
            yield
            return
        finder = _Names(_shared)
        _shared[0] = _IMPORTING
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # a library has replaced the list
                sys.meta_path.remove(finder)
            _shared[0] = _READY if shows_progress() else _AFTER
            until = time.monotonic() + 0.5
            while _shared[0] == _READY and time.monotonic() < until:
                time.sleep(0.005)  # the parent first clears its line on the terminal


def guarded(work: Callable[[], int]) -> int:
    """Run a command that imports libraries, and return its exit code; 2 if a library ended its process."""
    global _shared
    if not _can_fork():
        return work()
    import mmap

    _shared = mmap.mmap(-1, _SIZE)
    _shared[0] = _BEFORE
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    try:
        child = os.fork()
    except OSError:  # no further process is allowed
        _shared = None
        return work()
    if child == 0:
        _finish(work)
    status = _watch(child, _shared)
    code = os.waitstatus_to_exitcode(status)
    if _shared[0] == _IMPORTING and code != 130:  # 130: interrupted
        print(f"diffusers-quantfix: {_death(code, _imported(_shared))}", file=sys.stderr)
        return 2
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def _can_fork() -> bool:
    # macOS: a child that was forked without exec may not use the system's own libraries.
    if not sys.platform.startswith("linux"):
        return False
    import threading

    return threading.active_count() == 1


def _finish(work: Callable[[], int]) -> None:
    """The child: run the command and exit at once, without the second that cleaning up the libraries takes."""
    code = 1
    gc.disable()  # a fifth of the imports, and nothing here is large
    try:
        try:
            code = work()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else (1 if leaving.code else 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        os._exit(code)


def _watch(child: int, shared: mmap) -> int:
    """Wait for the child and show its progress; return its wait status."""
    import signal

    # Ctrl-C reaches both, and the child handles it.  A signal that would end this process is passed on to the child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    if not shows_progress():
        return os.waitpid(child, 0)[1]
    start, drawn, count = time.monotonic(), 0, 0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or shared[0] == _READY:
            _draw(" " * drawn + "\r" if drawn else "")
            drawn = 0
            if ended:
                return status
            shared[0] = _SEEN
        elif shared[0] == _IMPORTING:
            library = _imported(shared).partition(".")[0]
            line = f"{_SPINNER[count % 4]} importing {library or 'the libraries'} ({time.monotonic() - start:.0f} s)"
            _draw(line.ljust(drawn) + "\r")
            drawn, count = max(drawn, len(line)), count + 1
        time.sleep(_TICK if shared[0] == _IMPORTING else _TICK / 5)


def _draw(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _imported(shared: mmap) -> str:
    return bytes(shared[1:]).partition(b"\0")[0].decode("utf-8", errors="replace")


def _death(code: int, module: str) -> str:
    library = module.partition(".")[0]
    where = f" while {library} was being imported" if library else ""
    last = f", the last module was {module}" if module != library else ""
    advice = (
        f"; `{os.path.basename(sys.executable)} -X faulthandler -c 'import {library}'` shows where"
        if library
        else ""
    )
    return f"{process_end(code)}{where}{last}{advice}"


class _Names:
    """A finder that finds nothing, and records what is being imported, except Python's own modules and ours."""

    def __init__(self, shared: mmap) -> None:
        self._shared = shared
        self._unsaid = frozenset((*sys.stdlib_module_names, __name__.partition(".")[0]))

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self._unsaid:
            return
        data = name.encode("utf-8", errors="replace")[: _SIZE - 2] + b"\0"
        self._shared[1 : 1 + len(data)] = data
