"""The hooks of accelerate: which a module has, whether it is offloaded, and where it runs.

accelerate marks a module with ``_hf_hook``. One class, ``AlignDevicesHook``, has two uses: with ``offload=True`` it
keeps the weights away from the device (CPU or disk, ``meta`` in between) and fetches them for each forward pass, as
``enable_sequential_cpu_offload``, ``cpu_offload`` and a ``device_map`` with "cpu" or "disk" do; with ``offload=False``
it only brings the inputs to the weights, as ``dispatch_model`` does for every 8-bit model and for every model that is
spread over several GPUs. Code that looks only at the class mistakes the second for the first. The fixes that must tell
them apart share these functions.

Group offloading of diffusers has hooks of its own, and a function that finds them.

No library is imported here: without ``accelerate.hooks``, or the module of group offloading, in the process no hook
can exist.

Upstream: accelerate/hooks.py (``AlignDevicesHook``, ``SequentialHook``), accelerate/big_modeling.py
(``dispatch_model``, ``cpu_offload``), diffusers/hooks/group_offloading.py.
"""

from __future__ import annotations

import itertools
import sys

from ..engine.errors import TargetMissing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = [
    "accelerate_hooks",
    "align_hooks",
    "device_past_meta",
    "is_group_offloaded",
    "is_held_on_meta",
    "is_sequentially_offloaded",
    "is_spread",
    "offload_execution_device",
    "offloaded_stand_in",
]


def accelerate_hooks(module: Any) -> Iterator[Any]:
    """Yield the hooks that accelerate has put on ``module`` itself, in the order in which they run.

    Those inside a ``SequentialHook`` come one by one. ``module`` may be anything.
    """
    sequential = getattr(sys.modules.get("accelerate.hooks"), "SequentialHook", ())
    pending = [getattr(module, "_hf_hook", None)]
    while pending:
        hook = pending.pop(0)
        if isinstance(hook, sequential):
            pending[:0] = hook.hooks
        elif hook is not None:
            yield hook


def align_hooks(module: Any) -> Iterator[Any]:
    """Yield those of `accelerate_hooks` that are an ``AlignDevicesHook``, offloading or not."""
    align = getattr(sys.modules.get("accelerate.hooks"), "AlignDevicesHook", ())
    for hook in accelerate_hooks(module):
        if isinstance(hook, align):
            yield hook


def is_sequentially_offloaded(module: Any) -> bool:
    """True if an accelerate hook keeps weights of ``module``, or of any submodule, away from their device.

    ``module`` may be anything (a pipeline's tokenizer, scheduler, None): what is no ``torch.nn.Module`` has no weights
    to offload. The whole tree counts, since the hook sits on the submodules that own the weights; the root of an
    offloaded model has at best one that aligns its inputs.
    """
    for _hook in _offloading_hooks(module):
        return True
    return False


def is_spread(module: Any) -> bool:
    """True if a ``device_map`` has put the parts of ``module`` on more than one place, devices or disk."""
    places = getattr(module, "hf_device_map", None)
    return isinstance(places, dict) and len(set(map(str, places.values()))) > 1


def is_group_offloaded(module: Any) -> bool:
    """True if group offloading of diffusers moves weights in the tree of ``module``, which may be anything."""
    offloading = sys.modules.get("diffusers.hooks.group_offloading")
    enabled = getattr(offloading, "_is_group_offload_enabled", None)
    # Whoever loaded the module has loaded torch.
    return enabled is not None and isinstance(module, sys.modules["torch"].nn.Module) and enabled(module)


def offload_execution_device(module: Any) -> Any:
    """The ``torch.device`` on which the offloaded weights of ``module`` are used, None if nothing is offloaded.

    The device is that of the first offloading hook in the tree, in the order of ``module.parameters()``: the device on
    which the first parameter will be when it is needed, hence what ``module.device`` means. It is returned as the hook
    has it, without an index if the hook has none.

    A submodule whose weights are fetched by a hook on its parent (``place_submodules``) has none of its own: None.
    """
    for hook in _offloading_hooks(module):
        device = getattr(hook, "execution_device", None)
        if device is None:
            continue
        import torch

        # accelerate takes a bare int for the accelerator of that index, as torch does.
        return device if isinstance(device, torch.device) else torch.device(device)
    return None


def device_past_meta(upstream: property) -> property:
    """``upstream``, the ``device`` of a model class, where an offloaded model says where it runs instead of ``meta``.

    Raises:
        TargetMissing: it is no property.
    """
    if not isinstance(upstream, property):
        raise TargetMissing("the device of a model is no property")
    first_device: Any = upstream.fget

    def device(self: Any) -> Any:
        answer = first_device(self)
        # Every forward pass returns here: no look at hooks, nothing that torch.compile could not follow.
        if answer.type != "meta":
            return answer
        return offload_execution_device(self) or answer

    return property(device, doc=upstream.__doc__)


def is_held_on_meta(module: Any) -> bool:
    """True if ``module`` seems to be on ``meta``, because an offloading hook holds its weights for now.

    The first parameter (or buffer, without parameters) decides, as it does for the ``device`` of a model. False for an
    honest meta model, which no hook holds, and for anything that is no module.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(module, torch.nn.Module):
        return False
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        # Hooks last: most modules are not on meta, and a walk through all submodules takes milliseconds.
        return tensor.device.type == "meta" and is_sequentially_offloaded(module)
    return False


def offloaded_stand_in(cls: Any) -> Any:
    """A bare instance of the ``torch.nn.Module`` class ``cls`` with one weight, as if accelerate had offloaded it.

    For probes: no config is needed, nothing is allocated (the weight is on meta), no forward can be run. Its hook
    runs on the CPU. None where accelerate is not loaded, and nothing can be offloaded.
    """
    hooks: Any = sys.modules.get("accelerate.hooks")
    if not hasattr(hooks, "AlignDevicesHook"):
        return None
    import torch

    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    module.weight = torch.nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)
    module._hf_hook = hooks.AlignDevicesHook(execution_device=torch.device("cpu"), offload=True)
    return module


def _offloading_hooks(module: Any) -> Iterator[Any]:
    """Yield the ``AlignDevicesHook`` objects with ``offload=True`` in the tree of ``module``, parents first."""
    # Whoever loaded accelerate.hooks has loaded torch.
    if "accelerate.hooks" not in sys.modules or not isinstance(module, sys.modules["torch"].nn.Module):
        return
    for submodule in module.modules():
        for hook in align_hooks(submodule):
            if hook.offload:
                yield hook
