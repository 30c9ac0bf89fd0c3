"""Free the memory of pipelines and models, record it during a run, and save copies of weights.

`release` and `releasing` free, `track` records, `keep_host_copies` saves copies. Inside: `plan` decides what is
released, `threads` waits for other threads inside it, `guard` makes a later use a clear error, `references` finds what
cannot be freed safely, `emptying` frees the rest in place, `census` and `holders` find live objects and what holds
them, `samples` is what `tracking` records and what `plot` and `track_table` show, `host_copies` puts copies in place.
"""

from __future__ import annotations

from ..placement.released import InUseError, ReleasedError
from .freeing import release, releasing
from .keeping import keep_host_copies
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
    "keep_host_copies",
    "release",
    "releasing",
    "track",
]
