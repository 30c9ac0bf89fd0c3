"""Makes libraries forget what they once found out about this machine's GPUs."""

from __future__ import annotations

import functools
import sys

_LIBRARIES = {"accelerate", "bitsandbytes", "diffusers", "peft", "transformers"}


def clear() -> None:
    """Empty their ``lru_cache`` answers, accelerate's current device and bitsandbytes' code books."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _LIBRARIES:
            for value in list(vars(module).values()):  # not getattr: some of these modules import lazily
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is not None:
        functional.name2qmap.clear()  # tensors, on whatever device asked first
