"""How a component is offloaded, and which tensors its hooks keep for offloaded weights: those are not misplaced.

Upstream: accelerate/hooks.py (``AlignDevicesHook``, ``CpuOffload``), accelerate/utils/offload.py (``PrefixedDataset``,
``OffloadedWeightsLoader``), diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..offloading.hooks import accelerate_hooks, align_hooks, attribute, is_group_offloaded, is_spread
from .modules import modules_of

__all__ = [
    "HOOK_ATTRIBUTES",
    "Resting",
    "offload_kind",
    "onloaded_by_hooks",
]

HOOK_ATTRIBUTES = frozenset({"_hf_hook", "_diffusers_hook", "_group_offload_hooks"})
_GROUP_HOOK = "group_offloading"


def onloaded_by_hooks(root: Any) -> set[int]:
    """The ``id`` of every submodule of ``root`` whose weights an offloading hook onloads for its forward pass."""
    held: set[int] = set()
    for module in modules_of(root):
        for hook in align_hooks(module):
            if hook.offload:
                places_all = getattr(hook, "place_submodules", False)
                held.update(id(part) for part in (module.modules() if places_all else (module,)))
    return held


def offload_kind(root: Any) -> str:
    """How ``root`` is offloaded: "sequential", "model", "group", "device map", or "" if it is not."""
    if onloaded_by_hooks(root):
        return "sequential"
    if is_group_offloaded(root):
        return "group"
    if any(type(hook).__name__ in ("CpuOffload", "CustomOffloadHook") for hook in accelerate_hooks(root)):
        return "model"
    return "device map" if is_spread(root) else ""


class Resting:
    """The tensors that hooks keep in memory for offloaded weights. Weights offloaded to disk are not read.

    Use one instance per walk over one component: it remembers the keys of each dict of weights.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[dict[str, Any], dict[str, list[str]]]] = {}

    def tensors(self, module: Any, path: str) -> Iterator[tuple[str, Any]]:
        """Yield the dotted name of each offloaded weight of ``module``, and the tensor that is kept for it.

        Args:
            module: a module; hooks of its submodules are ignored.
            path: its dotted name within the component.
        """
        prefix = f"{path}." if path else ""
        for hook in accelerate_hooks(module):
            mapping = attribute(hook, "weights_map")
            if mapping is None:
                continue
            lead = ""
            while type(mapping).__name__ == "PrefixedDataset":
                lead, mapping = mapping.prefix + lead, mapping.dataset
            in_memory = mapping if isinstance(mapping, dict) else getattr(mapping, "state_dict", None)
            if not isinstance(in_memory, dict):
                continue
            # The dict is that of the whole component: yield only the weights of this module.
            for key in self._below(in_memory, lead):
                tensor = in_memory[key]
                if hasattr(tensor, "untyped_storage"):
                    own = key[len(lead) :]
                    if own.partition(".")[0] not in module._modules or getattr(
                        hook, "place_submodules", False
                    ):
                        yield prefix + own, tensor
        group = _group(module)
        if group is not None:
            names = {
                id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            }
            for tensor, copy in list(getattr(group, "cpu_param_dict", {}).items()):
                # A group of several modules is visited at each of them: yield only this module's tensors.
                if id(tensor) in names:
                    yield prefix + names[id(tensor)], copy

    def _below(self, in_memory: dict[str, Any], lead: str) -> list[str]:
        """The keys that begin with ``lead``, in order."""
        if lead and not lead.endswith("."):
            return [key for key in in_memory if key.startswith(lead)]
        known = self._known.get(id(in_memory))
        if known is None:
            below: dict[str, list[str]] = {"": list(in_memory)}
            for key in in_memory:
                end = key.find(".") + 1
                while end:
                    below.setdefault(key[:end], []).append(key)
                    end = key.find(".", end) + 1
            known = self._known[id(in_memory)] = in_memory, below
        return known[1].get(lead, [])


def _group(module: Any) -> Any:
    registry = attribute(module, "_diffusers_hook")
    hook = getattr(registry, "hooks", {}).get(_GROUP_HOOK) if registry is not None else None
    return getattr(hook, "group", None)
