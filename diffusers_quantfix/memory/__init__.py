"""Free the memory of pipelines and models, and watch it.

`release` and `releasing` free; `track` watches. Inside: `plan` decides what may go, `emptying` frees tensors in
place, `census` and `holders` find who is alive and who holds what, `guard` makes a later use a clear error,
`tracking` and `plot` draw the memory of a run.
"""

from __future__ import annotations

from .freeing import release, releasing
from .guard import ReleasedError
from .report import Bystander, Kept, Release, Survivor
from .tracking import Sample, Track, track

__all__ = [
    "Bystander",
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
