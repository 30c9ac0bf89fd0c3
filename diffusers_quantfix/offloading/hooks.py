"""accelerate's hooks: which hooks a module has, whether it is offloaded, and its execution device.

accelerate stores a module's hook in ``_hf_hook``. One class, ``AlignDevicesHook``, has two uses. With ``offload=True``
it keeps the weights on the CPU or disk, leaves meta tensors in the module and onloads the weights for each forward
pass: ``enable_sequential_cpu_offload``, ``cpu_offload`` and a ``device_map`` with "cpu" or "disk" use it. With
``offload=False`` it only moves the inputs to the weights' device: ``dispatch_model`` uses it for every 8-bit model and
every model spread over several GPUs. Code that checks only the class mistakes the second for the first. The fixes that
must distinguish them share these functions.

diffusers' group offloading has its own hooks, which `is_group_offloaded` finds.

No library is imported here: no hook can exist before ``accelerate.hooks``, or the module of group offloading, is
imported.

Upstream: accelerate/hooks.py (``AlignDevicesHook``, ``SequentialHook``), accelerate/big_modeling.py
(``dispatch_model``, ``cpu_offload``), diffusers/hooks/group_offloading.py.
"""

from __future__ import annotations

import itertools
import sys

from ..engine.classes import namespace
from ..engine.errors import TargetMissing
from ..engine.interruptions import heed_interruption

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = [
    "accelerate_hooks",
    "align_hooks",
    "attribute",
    "child_hooks",
    "device_past_meta",
    "group_again",
    "group_config",
    "group_onload_device",
    "is_group_offloaded",
    "is_held_on_meta",
    "is_sequentially_offloaded",
    "is_spread",
    "offload_execution_device",
    "offloaded_stand_in",
    "take_off_child_hooks",
]


_CHILD_HOOKS = "_quantfix_direct_calls"
_AGAIN = "_maybe_remove_and_reapply_group_offloading"


def child_hooks(hook: Any) -> list[Any]:
    """The handles of torch's hooks that ``diffusers-group-offload-direct-calls`` gives the children of the module of
    ``hook``, a hook of group offload."""
    handles: list[Any] = vars(hook).setdefault(_CHILD_HOOKS, [])
    return handles


def take_off_child_hooks(hook: Any) -> None:
    """Remove them: they hold ``hook`` and its group's weights."""
    for handle in (namespace(hook) or {}).pop(_CHILD_HOOKS, ()):
        handle.remove()


def attribute(value: Any, name: str) -> Any:
    """None where there is none, also if a ``__getattr__`` raises another error, as a lookup in a dictionary does."""
    try:
        return getattr(value, name, None)
    except Exception as error:
        heed_interruption(error)
        return None


def accelerate_hooks(module: Any) -> Iterator[Any]:
    """Yield the accelerate hooks of ``module`` itself, in the order in which they run.

    The hooks inside a ``SequentialHook`` are yielded one by one. ``module`` may be any object.
    """
    sequential = getattr(sys.modules.get("accelerate.hooks"), "SequentialHook", ())
    pending = [attribute(module, "_hf_hook")]
    while pending:
        hook = pending.pop(0)
        if isinstance(hook, sequential):
            pending[:0] = hook.hooks
        elif hook is not None:
            yield hook


def align_hooks(module: Any) -> Iterator[Any]:
    """Yield the `accelerate_hooks` that are an ``AlignDevicesHook``, offloading or not."""
    align = getattr(sys.modules.get("accelerate.hooks"), "AlignDevicesHook", ())
    for hook in accelerate_hooks(module):
        if isinstance(hook, align):
            yield hook


def is_sequentially_offloaded(module: Any) -> bool:
    """Whether an accelerate hook offloads weights of ``module`` or of any submodule.

    ``module`` may be any object (a pipeline's tokenizer, scheduler, None): False if it is not a ``torch.nn.Module``.
    Submodules count because the hooks are on the modules that own the weights; the root of an offloaded model has at
    most a hook that aligns its inputs.
    """
    for _hook in _offloading_hooks(module):
        return True
    return False


def is_spread(module: Any) -> bool:
    """Whether a ``device_map`` has put parts of ``module`` on more than one device (the disk counts as one)."""
    places = attribute(module, "hf_device_map")
    return isinstance(places, dict) and len(set(map(_place, places.values()))) > 1


def _place(device: Any) -> str:
    """One text for each device of a ``device_map``: 0, "cuda", "cuda:0" and ``torch.device("cuda", 0)`` are one."""
    kind, _, index = str(device).partition(":")
    return kind if kind in ("cpu", "disk", "mps", "meta") or kind.isdigit() else index or "0"


def is_group_offloaded(module: Any) -> bool:
    """Whether diffusers' group offloading moves weights of ``module`` or a submodule. ``module`` may be any object."""
    offloading = sys.modules.get("diffusers.hooks.group_offloading")
    enabled = getattr(offloading, "_is_group_offload_enabled", None)
    # diffusers.hooks imports torch.
    return enabled is not None and isinstance(module, sys.modules["torch"].nn.Module) and enabled(module)


def group_onload_device(module: Any) -> Any:
    """The device that diffusers' group offloading moves ``module``, any object, to for its pass; None without it."""
    if not is_group_offloaded(module):
        return None
    return sys.modules["diffusers.hooks.group_offloading"]._get_group_onload_device(module)


def group_config(module: Any) -> Any:
    """The config with which ``module``, any object, is group-offloaded; None if it is not.

    It is also None before diffusers 0.35.0, where groups cannot be set up once more.
    """
    if _offloading(_AGAIN) is None or not is_group_offloaded(module):
        return None
    return getattr(_offloading("_get_top_level_group_offload_hook")(module), "config", None)


def group_again(module: Any, config: Any) -> None:
    """Set the groups of ``module`` up once more; also if an earlier call was interrupted.

    Args:
        module: a ``torch.nn.Module`` whose layers or weights have changed.
        config: its `group_config` from before; nothing is done if that is None.
    """
    if config is None:
        return
    if is_group_offloaded(module):
        _offloading(_AGAIN)(module)
    else:  # it was interrupted after the removal
        _offloading("_apply_group_offloading")(module, config)


def _offloading(name: str) -> Any:
    return getattr(sys.modules.get("diffusers.hooks.group_offloading"), name, None)


def offload_execution_device(module: Any) -> Any:
    """The ``torch.device`` on which the offloaded weights of ``module`` are used; None if nothing is offloaded.

    It is the execution device of the first offloading hook in the order of ``module.parameters()``, hence where the
    first parameter will be when it is used, which is what ``module.device`` means. It has an index only if the hook's
    device has one.

    A submodule whose weights are onloaded by a hook of its parent (``place_submodules``) has no such hook: None.
    """
    for hook in _offloading_hooks(module):
        device = getattr(hook, "execution_device", None)
        if device is None:
            continue
        import torch

        # accelerate treats a bare int as the accelerator with that index, as torch does.
        return device if isinstance(device, torch.device) else torch.device(device)
    return None


def device_past_meta(upstream: property) -> property:
    """``upstream``, the ``device`` property of a model class, but the execution device for an offloaded model.

    Without it, an offloaded model's ``device`` is ``meta``.

    Raises:
        TargetMissing: ``upstream`` is not a property.
    """
    if not isinstance(upstream, property):
        raise TargetMissing("the device of a model is no property")
    first_device: Any = upstream.fget

    def device(self: Any) -> Any:
        answer = first_device(self)
        # Every forward pass returns here: it reads no hooks and does nothing that torch.compile cannot trace.
        if answer.type != "meta":
            return answer
        return offload_execution_device(self) or answer

    return property(device, doc=upstream.__doc__)


def is_held_on_meta(module: Any) -> bool:
    """Whether ``module`` seems to be on ``meta`` because an offloading hook holds its weights.

    The first parameter (or buffer, without parameters) decides, as it does for the ``device`` of a model. False for a
    real meta model, which has no such hook, and for any object that is not a module.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(module, torch.nn.Module):
        return False
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        # Check the hooks last: most modules are not on meta, and walking all submodules takes milliseconds.
        return tensor.device.type == "meta" and is_sequentially_offloaded(module)
    return False


def offloaded_stand_in(cls: Any) -> Any:
    """A bare instance of the ``torch.nn.Module`` class ``cls`` with one weight, as if accelerate had offloaded it.

    For probes: it needs no config and allocates nothing (the weight is on meta), but cannot run ``forward``. The hook's
    execution device is the CPU. None if accelerate is not imported, since nothing can be offloaded then.
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
    # accelerate.hooks imports torch.
    if "accelerate.hooks" not in sys.modules or not isinstance(module, sys.modules["torch"].nn.Module):
        return
    for submodule in module.modules():
        for hook in align_hooks(submodule):
            if hook.offload:
                yield hook
