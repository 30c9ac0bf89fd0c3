"""Imported by a program on a machine without a GPU: the fake CUDA devices of `tests.rig`, for the whole process."""

from __future__ import annotations

import atexit
import os
import traceback

import torch

from tests import rig

if not torch.cuda.is_available():
    import bitsandbytes  # noqa: F401  # both look for GPUs when they are imported
    import diffusers  # noqa: F401

    _devices = rig.devices()
    _devices.__enter__()


@atexit.register
def _end() -> None:
    try:
        rig.assert_waited()
    except AssertionError:  # which the interpreter ignores here
        traceback.print_exc()
        os._exit(1)
