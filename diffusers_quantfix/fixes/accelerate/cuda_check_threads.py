"""accelerate's check for a GPU fails in threads.

Symptom: KeyError 'PYTORCH_NVML_BASED_CUDA_CHECK' at random in programs with threads, from loading onto a GPU
    (``set_module_tensor_to_device``), ``clear_device_cache`` or ``Accelerator()``. The variable may stay in
    ``os.environ``, and child processes inherit it.
Cause: ``is_cuda_available`` sets the variable of the whole process each time, and then removes it, or puts back what it
    found: that of another thread.
Upstream: not reported; accelerate/utils/environment.py, ``patch_environment``.
Patch: one thread after the other makes this check.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.locks import Lock
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="accelerate-cuda-check-threads",
    module="accelerate.utils.imports",
    claims={"accelerate": ">=1.1.0,<=1.15.0"},
    patterns=("KeyError: 'PYTORCH_(NVML|CNDEV)_BASED_(CUDA|MLU)_CHECK'",),
    frames=("accelerate/utils/environment.py:patch_environment",),
    asked_once=True,
)

_SETS = "patch_environment"


def broken(imports: ModuleType) -> bool:
    """Does the check set a variable of the process?"""
    return _SETS in names_used(resolve(imports, "is_cuda_available"))


def patch(imports: ModuleType, draft: Draft) -> None:
    lock = Lock()

    def make(original):
        @contextlib.contextmanager
        def patch_environment(**kwargs):
            with lock.held, original(**kwargs):
                yield

        return patch_environment

    draft.wrap_plain(imports, _SETS, make)
