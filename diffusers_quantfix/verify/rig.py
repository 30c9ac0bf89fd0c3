"""The rig of the repository's tests: fake CUDA devices for a CPU-only build of torch.

It is not part of the wheel. If this package runs from a clone, ``tests/rig`` is beside it, and a child process of
`verify` may load it; the package itself never imports it.
"""

from __future__ import annotations

import os
import sys

_CLONE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_MODULE = "tests.rig.cases"
NO_CODE = (
    "the rig keeps CUDA's own code out"  # the beginning of its error where a CUDA build of torch calls it
)
ELSEWHERE = "it is part of the repository, not of the installed package; run this in a clone"


def is_here() -> bool:
    """Whether this package runs from a clone of the repository."""
    return os.path.isfile(os.path.join(_CLONE, *_MODULE.split(".")) + ".py")


def command() -> list[str]:
    """The command to run instead of ``python -m diffusers_quantfix.verify.child``."""
    # Not "-m": the clone may not be the working directory, and must come before other folders named tests.
    start = f"import runpy, sys; sys.path.insert(0, {_CLONE!r}); runpy.run_module({_MODULE!r}, run_name='__main__')"
    return [sys.executable, "-c", start]


def advice(count: int, asked: bool, without: str) -> str:
    """Advice about bugs that need a CUDA device, as a sentence; "" if none is needed.

    Args:
        count: how many were not reproduced for want of a device.
        asked: whether the rig was requested.
        without: why there was no rig although it was requested; "" if there was one.
    """
    bugs = f"{count} bug{'s need' if count != 1 else ' needs'} a CUDA device"
    if without:
        return f"without the rig: {without}" + (f"; {bugs}" if count else "")
    if asked or not count:
        return ""
    if is_here():
        return f"{bugs}: `verify --rig` reproduces them on the fake devices of tests/rig"
    return f"{bugs}: run this where there is one, or `verify --rig` in a clone of the repository, which has fakes"
