"""Work in a forked process: what it changes is gone with it, and what was loaded before need not be loaded again."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from typing import Any


class Failed(Exception):
    """What went wrong in the forked process, in one line: the type of the error, and its text."""


def line(error: BaseException) -> str:
    if isinstance(error, Failed):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def renew_threads() -> None:
    """In a forked process, before it has threads: the first use of torch's thread pool there makes a new one, and where
    two threads are first at once, one of them raises "Invalid thread pool!"."""
    import torch

    torch.set_num_threads(1)


def forked(function: Callable[[], Any]) -> Any:
    """What ``function`` returns in a forked process; any error there is raised here as ``Failed``."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = os.fork()
    if not process:
        try:
            renew_threads()
            answer = True, function()
        except BaseException as error:
            answer = False, line(error)
        writer.send_bytes(pickle.dumps(answer))
        os._exit(0)
    writer.close()
    try:
        good, said = pickle.loads(reader.recv_bytes())
    except EOFError:
        good, said = False, "Crash: the process ended before it was done"
    finally:
        reader.close()
        os.waitpid(process, 0)
    if not good:
        raise Failed(said)
    return said
