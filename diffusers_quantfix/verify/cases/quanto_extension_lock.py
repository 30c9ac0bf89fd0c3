"""A program stops waiting for a compile that was killed."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os
    import threading
    from unittest import mock

    import torch.utils.cpp_extension  # noqa: F401  # it takes longer than the wait, and the thread would import it
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

    with mock.patch.object(extension_lock, "QUIET", 0.2):
        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        for _ in range(12):  # short waits: on a busy machine the thread gets as many turns as this one
            thread.join(0.1)
    waits = thread.is_alive()
    os.remove(lock)  # ends a thread that is still waiting
    thread.join(20.0)
    assert not waits, "still waits for an abandoned lock"
    return f"stops waiting for an abandoned lock ({said[0]})"
