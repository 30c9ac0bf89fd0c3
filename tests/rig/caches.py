"""Makes libraries forget what they once found out about this machine's GPUs."""

from __future__ import annotations

import functools
import gc
import sys

_LIBRARIES = {"accelerate", "bitsandbytes", "diffusers", "peft", "transformers"}


def clear() -> None:
    """Empty the libraries' ``lru_cache``\\ s ("is CUDA available?") and accelerate's idea of the current device."""
    for candidate in gc.get_objects():
        if type(candidate) is functools._lru_cache_wrapper:
            if (getattr(candidate, "__module__", None) or "").partition(".")[0] in _LIBRARIES:
                candidate.cache_clear()
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
