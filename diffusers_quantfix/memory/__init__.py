"""Free the memory of pipelines and models, and record it during a run.

`release` and `releasing` free; `track` records. Inside: `plan` decides what is released, `threads` waits for other
threads inside it, `guard` makes a later use a clear error, `references` finds what cannot be freed safely, `emptying`
frees the rest in place, `census` and `holders` find live objects and what holds them, `samples`
is what `tracking` records and what `plot` and `track_table` show.
"""

from __future__ import annotations

from ..placement.released import InUseError, ReleasedError
from .freeing import release, releasing
from .report import Bystander, Kept, Release, Survivor
from .samples import Sample
from .tracking import Track, track

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
