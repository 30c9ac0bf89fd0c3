"""The fixes, one file each, and the index that tells the watcher their targets.

A fix has one or more targets, the modules with the bug; each target is decided and patched separately.
``python -m tests.new_fix --remove ID`` removes a fix everywhere.

A new fix, in a clone:

1. ``python -m tests.new_fix ID --target MODULE`` writes four stubs and the index, and prints what to fill in;
   ``--help`` lists the other options.  The tests fail until no FILL IN is left.
2. The test, ``tests/fixes/test_ID.py``: do what a user does and assert the right result.  It must be red without the
   patch: ``python -m pytest tests/fixes/test_ID.py --side bare`` passes when it fails with upstream's own error.
3. The fix, ``fixes/LIBRARY/NAME.py``: ``broken`` looks for the bug in the installed code, ``patch`` writes through its
   draft.  ``python -m pytest tests/fixes/test_ID.py`` is green.
4. The case, ``verify/cases/ID.py``: the same situation for ``python -m diffusers_quantfix verify ID``, without pytest.
5. A line in CHANGELOG.md: what works now, without versions.  A block in ``tests/tools/errors.txt``: what upstream
   raised in step 2, from which ``explain`` must find the fix (``patterns``, ``frames``).
6. ``python -m tests.upstream --cells all --fixes ID --write`` proves the claimed range, release by release, and writes
   the generated files; ``python -m tests.upstream.tables --write`` writes them without running anything.
"""

from __future__ import annotations

from .index import OPTIONS, ROWS, TESTED

__all__ = ["DISTRIBUTIONS", "FIXES", "MODULES", "NAMES", "OPTIONS", "TESTED"]

# The modules that have a bug: the ones to watch.
MODULES = frozenset([row[1] for row in ROWS])

# id of a fix -> names of its targets
FIXES: dict[str, tuple[str, ...]] = {}
for _row in ROWS:
    FIXES[_row[4]] = (*FIXES.get(_row[4], ()), _row[0])

# What a user may name (a fix or one of its targets) -> names of the targets it stands for.
NAMES: dict[str, tuple[str, ...]] = {**{row[0]: (row[0],) for row in ROWS}, **FIXES}

# The distributions whose versions matter, in the order in which people think of them.
DISTRIBUTIONS = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "optimum-quanto",
    "gguf",
    "torchao",
    "peft",
    "wrapt",
    "packaging",
)
