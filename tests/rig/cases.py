"""The child process of ``verify --rig``: the cases that need a CUDA device run on the fake ones.

    python -m tests.rig.cases results work [id ...]

The package starts it where it finds this folder beside itself, in a clone of the repository (`verify.rig`).
"""

from __future__ import annotations

import sys

from tests import rig

if __name__ == "__main__":
    without = rig.unavailable_reason()  # compiles the devices at the first call
    from diffusers_quantfix.verify import child

    child.main(*sys.argv[1:], devices=None if without else rig.devices, without=without or "")
