"""Live models whose offloaded weights rely on patched code: `revert` leaves that code where it is.

torch is not imported here.
"""

from __future__ import annotations

import gc
import sys

from ..engine.classes import class_name, mro, namespace
from ..engine.heap import PLAIN, objects_of
from ..weights.companions import is_host_copy, is_quant_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["four_bit_on_meta", "offloaded_eight_bit"]

_MODEL_HOOKS = ("CpuOffload", "CustomOffloadHook")
_UNTIL = "delete it or take its hooks off (pipe.remove_all_hooks()), then call revert() again"


def four_bit_on_meta() -> str:
    """A sentence if a 4-bit weight is offloaded to ``meta`` and only its host copy has the quant state."""
    for module in _modules():
        for weight in list(_held(module, "_parameters").values()):
            state = (namespace(weight) or {}).get("quant_state")
            if is_quant_state(state) and weight.is_meta and is_host_copy(state):
                return f"a 4-bit model is offloaded and would lose its quant states; {_UNTIL}"
    return ""


def offloaded_eight_bit() -> str:
    """A sentence if an 8-bit model is under model offload."""
    for module in _modules():
        hook = (namespace(module) or {}).get("_hf_hook")
        if any(class_name(cls) in _MODEL_HOOKS for cls in mro(type(hook))) and any(
            map(_is_eight_bit, _below(module))
        ):
            return f"an 8-bit model is under model offload and would lose its scales; {_UNTIL}"
    return ""


def _modules() -> Iterator[Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for value in objects_of(gc.get_objects, but=PLAIN):
        if issubclass(type(value), torch.nn.Module):
            yield value


def _below(root: Any) -> Iterator[Any]:
    seen: set[int] = set()
    pending = [root]
    while pending:
        module = pending.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield module
            pending += list(_held(module, "_modules").values())


def _is_eight_bit(module: Any) -> bool:
    return any(
        class_name(type(weight)) == "Int8Params" for weight in list(_held(module, "_parameters").values())
    )


def _held(module: Any, which: str) -> dict[str, Any]:
    held = (namespace(module) or {}).get(which)
    return held if isinstance(held, dict) else {}
