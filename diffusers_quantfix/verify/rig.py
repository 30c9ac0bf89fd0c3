"""The rig of the repository's tests: fake CUDA devices for a torch that is built for the CPU.

It is no part of the wheel.  Where this package runs from a clone, ``tests/rig`` lies beside it, and a child process of
`verify` may load it; the package itself never imports it.
"""

from __future__ import annotations

import os
import sys

_CLONE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_MODULE = "tests.rig.cases"
ELSEWHERE = "it is part of the repository, not of the installed package; run this in a clone"


def is_here() -> bool:
    """Whether this package runs from a clone of the repository."""
    return os.path.isfile(os.path.join(_CLONE, *_MODULE.split(".")) + ".py")


def command() -> list[str]:
    """What to run in place of ``python -m diffusers_quantfix.verify.child``."""
    # Not "-m": the clone is seldom the working directory, and must come before other folders called tests.
    start = f"import runpy, sys; sys.path.insert(0, {_CLONE!r}); runpy.run_module({_MODULE!r}, run_name='__main__')"
    return [sys.executable, "-c", start]


def advice(count: int, asked: bool, without: str) -> str:
    """What to do about defects that need a CUDA device, as a sentence; empty where there is nothing to say.

    Args:
        count: how many were not reproduced for want of one.
        asked: whether the rig was asked for.
        without: why it was not there all the same; empty where it was.
    """
    defects = f"{count} defect{'s need' if count != 1 else ' needs'} a CUDA device"
    if without:
        return f"without the rig: {without}" + (f"; {defects}" if count else "")
    if asked or not count:
        return ""
    if is_here():
        return f"{defects}: `verify --rig` reproduces them on the fake devices of tests/rig"
    return f"{defects}: run this where there is one, or `verify --rig` in a clone of the repository, which has fakes"
