"""A program stops waiting for a compile that was killed."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os
    import threading
    import time
    from unittest import mock

    from optimum.quanto.library.extensions import extension

    from ...fixes.quanto import extension_lock

    lock = os.path.join(work, "lock")
    with open(lock, "w"):
        pass
    said: list[str] = []

    def load() -> None:
        try:
            extension.load(name="quanto_none", sources=[], build_directory=work)
        except Exception as error:
            said.append(type(error).__name__)

    with mock.patch.object(extension_lock, "QUIET", 1.0):
        start = time.monotonic()
        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        thread.join(10.0)
        seconds = time.monotonic() - start
    waits = thread.is_alive()
    os.remove(lock)  # lets a thread go that waits still
    thread.join(20.0)
    assert not waits, f"still waits for an abandoned lock after {seconds:.0f} s"
    return f"stops waiting for an abandoned lock after {seconds:.0f} s ({said[0]})"
