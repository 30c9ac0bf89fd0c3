"""Free the memory of pipelines and models, record it during a run, and save copies of weights.

`release` and `releasing` free, `track` records, `keep_host_copies` saves copies. Inside: `plan` decides what is
released, `guard` makes a later use a clear error, `emptying` takes the tensors out, `census` finds live objects and
`holders` what holds them, `frames` reads what other threads are in, `samples` is what `tracking` records and what
`plot` and `track_table` show, `host_copies` puts copies in place.
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
