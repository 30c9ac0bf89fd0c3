"""A killed compile of quanto's extension blocks every later program.

Symptom: the first forward pass (or move, or load) of a model with int4 or int2 weights never returns, with no message
    and no load on the CPU; ``optimum/quanto/library/extensions/cpp/build/lock`` exists.
Cause: ``torch.utils.cpp_extension.load`` creates that file, compiles, and deletes it. A process killed meanwhile
    (SIGTERM, out of memory, a notebook kernel restarted) leaves it there, and ``FileBaton.wait`` of every later process
    waits until someone deletes it. The file does not say who created it, or whether that process is alive. From torch
    2.14 on it is an operating-system lock (pytorch issue 189245), which ends with its process.
Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/file_baton.py; torch/utils/file_baton.py; not
    reported for quanto.
Patch: for quanto's extensions only, the wait ends with an error when nothing in the build folder has changed for 45
    seconds. With ``quanto-extension-fallback`` PyTorch then does the work in this process; a running compile is not
    disturbed. A lock is deleted only when nothing there has changed for 30 minutes.
"""

from __future__ import annotations

import os
import time
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.interruptions import heed_interruption
from ...engine.probe import names_used

FIX = Fix(
    __doc__,
    id="quanto-extension-lock",
    module="optimum.quanto.library.extensions.extension",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7", "torch": "<2.14"},
    patterns=(r"extensions/\w+/build/lock", "optimum/quanto.{0,60}file_baton"),
    frames=("file_baton", "quanto", "lock"),
    fixed_in="torch 2.14.0",
    asked_once=True,
)

QUIET = 45.0  # seconds without a change after which a process does without the extension
ABANDONED = 1800.0  # seconds without a change after which a lock is deleted: no single file takes that long


def broken(extension: ModuleType) -> bool:
    """Can the wait end only with the lock?"""
    from torch.utils import cpp_extension

    FileBaton = getattr(cpp_extension, "FileBaton", None)
    if FileBaton is None:  # torch 2.14
        return False
    return not any(name.endswith(("Error", "Timeout", "timeout")) for name in names_used(FileBaton.wait))


def patch(extension: ModuleType, draft: Draft) -> None:
    from torch.utils.file_baton import FileBaton

    locks: set[str] = set()

    def make_load(original):
        def load(*args, **kwargs):
            folder = kwargs.get("build_directory")
            if folder is not None:
                lock = os.path.join(folder, "lock")
                locks.add(lock)
                delete_if_abandoned(lock)
            return original(*args, **kwargs)

        return load

    def make_wait(original):
        def wait(self):
            if self.lock_file_path in locks:
                return wait_while_it_changes(self.lock_file_path)
            return original(self)

        return wait

    draft.wrap_plain(extension, "load", make_load)
    draft.wrap_plain(FileBaton, "wait", make_wait)


def wait_while_it_changes(lock: str) -> None:
    """Wait until ``lock`` is gone.

    Raises:
        TimeoutError: nothing in its folder has changed for ``QUIET`` seconds.
    """
    tell("info", f"waiting for the process that compiles in {os.path.dirname(lock)}")
    seen, since = None, time.monotonic()
    while os.path.exists(lock):
        found = files_beside(lock)
        if found != seen:
            seen, since = found, time.monotonic()
        elif time.monotonic() - since > QUIET:
            raise TimeoutError(
                f"the lock of another process did not go away in {QUIET:.0f} s; unless one is compiling right now, "
                f"delete {lock}"
            )
        time.sleep(0.1)


def delete_if_abandoned(lock: str) -> None:
    """Delete ``lock`` if nothing in its folder has changed for ``ABANDONED`` seconds."""
    aside = f"{lock}.{os.getpid()}"
    try:
        found = os.stat(lock)
        newest = max(changed for _, changed, _ in files_beside(lock))
        if time.time() - newest / 1e9 < ABANDONED:
            return
        # Two processes may get here at once, and the slower one must not take the other's new lock. (Windows does not
        # rename a file that a process has open: there a lock in use is safe anyway.)
        os.rename(lock, aside)
        if os.stat(aside).st_mtime_ns != found.st_mtime_ns:
            os.link(aside, lock)
            os.remove(aside)
            return
        os.remove(aside)
    except (OSError, ValueError) as error:  # gone meanwhile, or the folder is not writable
        heed_interruption(error)
        return
    tell(
        "warning",
        f"deleted {lock}, left by a killed process; the extension is compiled again",
    )


def files_beside(lock: str) -> list[tuple[str, int, int]]:
    """Name, time of last change (ns) and size of every file in the folder of ``lock``."""
    found = []
    try:
        with os.scandir(os.path.dirname(lock)) as entries:
            for entry in entries:
                status = os.stat(entry.path)  # not the entry's own, which may be stale on Windows
                found.append((entry.name, status.st_mtime_ns, status.st_size))
    except OSError:  # just deleted
        pass
    return sorted(found)


def tell(level: str, sentence: str) -> None:
    import logging

    getattr(logging.getLogger(__name__.partition(".")[0]), level)("%s", sentence)
