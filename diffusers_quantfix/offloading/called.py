"""Models that are used other than through ``forward``, the only method whose hooks onload the weights.

A pipeline that calls a model's layers itself, or another of its methods, finds the weights offloaded: on the CPU, or on
``meta``. `as_called` runs such a function between the model's hooks, as if it were its ``forward``.

Upstream: accelerate/hooks.py (``add_hook_to_module``), diffusers/hooks/hooks.py (``HookRegistry``).
"""

from __future__ import annotations

from .direct_calls import DirectCall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["as_called", "called_with"]


def as_called(module: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)`` as the ``forward`` of ``module``: its own hooks onload the weights.

    They also move the inputs. Run are the hooks of accelerate (model and sequential offload, the manager of modular
    pipelines) and of diffusers (group offload), not torch's, which belong to the real ``forward``, but for those that
    onload a group for one of its modules.
    """
    hooks = [*_of_diffusers(module), *_of_accelerate(module), *_of_its_group(module)]
    for hook in reversed(hooks):
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
    output = function(*args, **kwargs)
    for hook in hooks:
        output = hook.post_forward(module, output)
    return output


def called_with(hook: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` between the two methods of ``hook``."""
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    return hook.post_forward(module, module(*args, **kwargs))


def _of_accelerate(module: Any) -> list[Any]:
    hook = vars(module).get("_hf_hook")
    return [] if hook is None else [hook]


def _of_diffusers(module: Any) -> list[Any]:
    """The hooks of group offload, innermost first; a cache's hooks must see whole forward passes only."""
    registry = vars(module).get("_diffusers_hook")
    if registry is None:
        return []
    return [registry.hooks[name] for name in registry._hook_order if "group_offloading" in name]


def _of_its_group(module: Any) -> list[Any]:
    """The hook of a module in whose model others form the blocks."""
    hooks = vars(module).get("_forward_pre_hooks") or {}
    owners = (getattr(hook, "__self__", None) for hook in hooks.values())
    return [owner for owner in owners if isinstance(owner, DirectCall)]
