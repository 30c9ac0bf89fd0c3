"""Counts what of this package a call runs through."""

from __future__ import annotations

import sys
from collections.abc import Callable


def our_frames(call: Callable[[], object]) -> int:
    """How many Python frames of this package a call enters."""
    import diffusers_quantfix

    folder = diffusers_quantfix.__file__.rpartition("/")[0]
    seen = 0

    def profile(frame, event, argument):
        nonlocal seen
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            seen += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen
