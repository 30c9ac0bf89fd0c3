"""Free the memory of pipelines and models, and watch it.

`release` and `releasing` free; `track` watches. Inside: `plan` decides what is released, `threads` waits for other
threads inside it, `guard` makes a later use a clear error, `references` finds what cannot be freed safely, `emptying`
frees the rest in place, `census` and `holders` find live objects and what holds them, `tracking` and `plot` draw the
memory of a run.
"""

from __future__ import annotations

from ..placement.released import InUseError, ReleasedError
from .freeing import release, releasing
from .report import Bystander, Kept, Release, Survivor
from .tracking import Sample, Track, track

__all__ = [
    "Bystander",
    "InUseError",
    "Kept",
    "Release",
    "ReleasedError",
    "Sample",
    "Survivor",
    "Track",
    "release",
    "releasing",
    "track",
]
