"""Free the memory of pipelines and models, and record it during a run.

`release` and `releasing` free; `track` records. Inside: `plan` decides what may go, `emptying` frees tensors in
place, `census` and `holders` find live objects and what holds them, `guard` makes a later use raise a clear error,
`samples` is
what `tracking` records and `plot` and `track_table` show.
"""

from __future__ import annotations

from .freeing import release, releasing
from .guard import ReleasedError
from .report import Bystander, Kept, Release, Survivor
from .samples import Sample
from .tracking import Track, track

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
