"""The child process of ``verify --rig``: the cases that need a CUDA device run on the fake ones.

    python -m tests.rig.cases results work [id ...]

With ``$DIFFUSERS_QUANTFIX_RIG_LATE`` the devices take time (`tests.rig.late`): what a case uses too early is 0xFF.

The package starts it where it finds this folder beside itself, in a clone of the repository (`verify.rig`).
"""

from __future__ import annotations

import functools
import os
import sys

from tests import rig

if __name__ == "__main__":
    without = rig.unavailable_reason()  # compiles the devices at the first call
    from diffusers_quantfix.verify import child

    devices = functools.partial(rig.devices, late=bool(os.environ.get("DIFFUSERS_QUANTFIX_RIG_LATE")))
    child.main(*sys.argv[1:], devices=None if without else devices, without=without or "")
