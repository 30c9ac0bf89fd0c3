"""Free the memory of pipelines and models, record it during a run, and avoid copying weights back to the CPU.

`release` and `releasing` free memory, `track` records it, and `keep_host_copies` avoids copies. Inside: `plan` decides
what is released, `guard` makes a later use a clear error, `emptying` removes the tensors, `census` finds live objects,
`holders` finds what holds them, `frames` reads the stacks of other threads, `samples` has what `tracking` records and
`plot` and `track_table` show, and `host_copies` keeps host copies and puts them back.
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
