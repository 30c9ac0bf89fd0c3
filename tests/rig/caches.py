"""Makes libraries forget what they once found out about this machine's GPUs."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

from .accelerator import KIND
from .undo import Undo

_LIBRARIES = {"accelerate", "bitsandbytes", "diffusers", "peft", "transformers"}
_OF_TORCH = f"torch.{KIND}"  # torch.xpu keeps the number of devices


def install(undo: Undo) -> None:
    """Forget now and once more when ``undo`` is done."""
    undo.call(clear)
    clear()
    # The one answer that is no function but a constant, computed at import.
    pipelines = sys.modules.get("diffusers.pipelines.pipeline_utils")
    supported = getattr(pipelines, "SUPPORTED_DEVICE_MAP", [KIND])
    if "cpu" in supported and KIND not in supported:
        undo.set(pipelines, "SUPPORTED_DEVICE_MAP", [*supported, KIND])


def clear() -> None:
    """Empty their ``lru_cache`` answers, accelerate's current device and bitsandbytes' code books."""
    for answer in _all_cached_answers(len(sys.modules)):
        answer.cache_clear()
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is not None:
        functional.name2qmap.clear()  # tensors, on whatever device asked first


@functools.lru_cache(maxsize=1)
def _all_cached_answers(modules: int) -> list:
    """Those of the libraries; looked for again whenever there are more modules than before."""
    return [
        answer
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _LIBRARIES or name == _OF_TORCH
        for answer in _cached_answers(module)
    ]


@functools.cache
def _cached_answers(module: ModuleType) -> list:
    """The ``lru_cache`` functions of a module and of the classes in it."""
    found = []
    for value in list(vars(module).values()):  # not getattr: some of these modules import lazily
        members = vars(value).values() if isinstance(value, type) else (value,)
        # Not getattr here either: transformers 5.5 has module objects that import something for any name.
        functions = (m.__func__ if isinstance(m, (staticmethod, classmethod)) else m for m in members)
        found += [function for function in functions if isinstance(function, functools._lru_cache_wrapper)]
    return found
