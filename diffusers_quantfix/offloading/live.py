"""Live models whose offloaded weights need patched code, which `revert` therefore leaves in place.

Each function returns the reason as a sentence, or an empty string.

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

__all__ = [
    "four_bit_on_meta",
    "gguf_on_meta",
    "merged_adapters",
    "moved_groups",
    "offloaded_eight_bit",
    "quanto_on_meta",
]

_MODEL_HOOKS = ("CpuOffload", "CustomOffloadHook")
_QUANTIZED = frozenset({"GGUFParameter", "Int8Params", "Params4bit", "QTensor", "TorchAOBaseTensor"})
_UNTIL = "delete it or take its hooks off (pipe.remove_all_hooks()), then call revert() again"


def four_bit_on_meta() -> str:
    """The reason if a 4-bit weight is offloaded to ``meta`` and only its host copy has the quant state."""
    for module in _modules():
        for weight in list(_held(module, "_parameters").values()):
            state = (namespace(weight) or {}).get("quant_state")
            if is_quant_state(state) and weight.is_meta and is_host_copy(state):
                return f"a 4-bit model is offloaded and would lose its quant states; {_UNTIL}"
    return ""


def offloaded_eight_bit() -> str:
    """The reason if an 8-bit model is under model offload."""
    for module in _modules():
        hook = (namespace(module) or {}).get("_hf_hook")
        if any(class_name(cls) in _MODEL_HOOKS for cls in mro(type(hook))) and any(
            map(_is_eight_bit, _below(module))
        ):
            return f"an 8-bit model is under model offload and would lose its scales; {_UNTIL}"
    return ""


def gguf_on_meta() -> str:
    """The reason if a GGUF model is under sequential offload."""
    return _on_meta("GGUFParameter", "GGUF")


def quanto_on_meta() -> str:
    """The reason if a quanto model is under sequential offload."""
    return _on_meta("QTensor", "quanto")


def moved_groups() -> str:
    """The reason if this package moves a group of diffusers' group offloading: a quantized one, or one on disk."""
    from .group_tensors import FILE
    from .inventory import INVENTORY

    upstream = sys.modules.get("diffusers.hooks.group_offloading")
    kind: Any = (namespace(upstream) or {}).get("ModuleGroup")
    for value in objects_of(gc.get_objects, but=PLAIN) if isinstance(kind, type) else ():
        if issubclass(type(value), kind) and {FILE, INVENTORY} & (namespace(value) or {}).keys():
            return (
                "a quantized model is group-offloaded, or a model to disk, and only this package moves it back "
                "to its device; delete it, then call revert() again"
            )
    return ""


def merged_adapters() -> str:
    """The reason if an adapter of peft is merged into a weight that is quantized or offloaded to ``meta``."""
    for module in _modules():
        if not (namespace(module) or {}).get("merged_adapters"):
            continue
        weight = _held(_held(module, "_modules").get("base_layer"), "_parameters").get("weight")
        if _is_meta(weight) or not _QUANTIZED.isdisjoint(map(class_name, mro(type(weight)))):
            return (
                "an adapter is merged into quantized or offloaded weights, and upstream's code cannot take it out; "
                "unmerge it (pipe.unfuse_lora()) or delete the model, then call revert() again"
            )
    return ""


def _on_meta(name: str, said: str) -> str:
    for module in _modules():
        for weight in list(_held(module, "_parameters").values()):
            if any(class_name(cls) == name for cls in mro(type(weight))) and _is_meta(weight):
                return f"a {said} model is offloaded and could no longer be moved to its device; {_UNTIL}"
    return ""


def _is_meta(weight: Any) -> bool:
    torch = sys.modules["torch"]
    with torch._C.DisableTorchFunctionSubclass():
        return issubclass(type(weight), torch.Tensor) and bool(weight.is_meta)


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
