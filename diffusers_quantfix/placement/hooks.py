"""What offload hooks of accelerate and diffusers keep, and for which modules: a weight that rests is not misplaced.

Upstream: accelerate/hooks.py (``AlignDevicesHook``, ``CpuOffload``), accelerate/utils/offload.py (``PrefixedDataset``,
``OffloadedWeightsLoader``), diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..offloading.hooks import accelerate_hooks, align_hooks

__all__ = [
    "HOOK_ATTRIBUTES",
    "group_offload_devices",
    "held_on_meta",
    "offload_kind",
    "resting_tensors",
]

HOOK_ATTRIBUTES = frozenset({"_hf_hook", "_diffusers_hook", "_group_offload_hooks"})
_GROUP_HOOK = "group_offloading"


def held_on_meta(root: Any) -> set[int]:
    """The ``id`` of every submodule of ``root`` whose weights an offloading hook fetches for its forward pass."""
    held: set[int] = set()
    for module in root.modules():
        for hook in align_hooks(module):
            if hook.offload:
                places_all = getattr(hook, "place_submodules", False)
                held.update(id(part) for part in (module.modules() if places_all else (module,)))
    return held


def group_offload_devices(root: Any) -> set[Any]:
    """The onload and offload devices of diffusers' group offloading anywhere in ``root``; empty without."""
    devices: set[Any] = set()
    for module in root.modules():
        group = _group(module)
        if group is not None:
            devices.update((group.onload_device, group.offload_device))
    return devices


def offload_kind(root: Any) -> str:
    """How ``root`` is offloaded: "sequential", "model", "group", "device map", or "" if it is not."""
    if held_on_meta(root):
        return "sequential"
    if group_offload_devices(root):
        return "group"
    if any(type(hook).__name__ in ("CpuOffload", "CustomOffloadHook") for hook in accelerate_hooks(root)):
        return "model"
    device_map = getattr(root, "hf_device_map", None)
    if isinstance(device_map, dict) and len({str(device) for device in device_map.values()}) > 1:
        return "device map"
    return ""


def resting_tensors(module: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The tensors that hooks of ``module`` keep aside in memory for its weights, with the weight's dotted name.

    Weights offloaded to disk are not read.

    Args:
        module: a module, of which only its own hooks are looked at.
        path: its dotted name within the component.
    """
    prefix = f"{path}." if path else ""
    for hook in accelerate_hooks(module):
        mapping = getattr(hook, "weights_map", None)
        if mapping is None:
            continue
        lead = ""
        while type(mapping).__name__ == "PrefixedDataset":
            lead, mapping = mapping.prefix + lead, mapping.dataset
        in_memory = mapping if isinstance(mapping, dict) else getattr(mapping, "state_dict", None)
        if not isinstance(in_memory, dict):
            continue
        # The dict is that of the whole component: only the weights of this module, the others have their turn.
        for key, tensor in list(in_memory.items()):
            if key.startswith(lead) and hasattr(tensor, "untyped_storage"):
                own = key[len(lead) :]
                if own.partition(".")[0] not in module._modules or getattr(hook, "place_submodules", False):
                    yield prefix + own, tensor
    group = _group(module)
    if group is not None:
        names = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        for tensor, copy in list(getattr(group, "cpu_param_dict", {}).items()):
            # A group of several modules is met at each of them; each names what is its own.
            if id(tensor) in names:
                yield prefix + names[id(tensor)], copy


def _group(module: Any) -> Any:
    registry = getattr(module, "_diffusers_hook", None)
    hook = getattr(registry, "hooks", {}).get(_GROUP_HOOK) if registry is not None else None
    return getattr(hook, "group", None)
