"""Models that are used other than through ``forward``, the only function whose hooks bring the weights.

A pipeline that runs the layers of a model itself, or a method of it, gets the weights where the offload left them: on
the CPU, or on ``meta``. `as_called` runs such a function between the hooks of the model, as if it was its ``forward``.

Upstream: accelerate/hooks.py (``add_hook_to_module``), diffusers/hooks/hooks.py (``HookRegistry``).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["as_called"]


def as_called(module: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` as the ``forward`` of ``module``, whose own hooks bring the weights and the inputs.

    The hooks are those of accelerate (model and sequential offload, the manager of modular pipelines) and those of
    diffusers (group offload). Those of torch are left out: they belong to the real ``forward``.
    """
    hooks = [*_of_diffusers(module), *_of_accelerate(module)]
    for hook in reversed(hooks):
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
    output = function(*args, **kwargs)
    for hook in hooks:
        output = hook.post_forward(module, output)
    return output


def _of_accelerate(module: Any) -> list[Any]:
    hook = vars(module).get("_hf_hook")
    return [] if hook is None else [hook]


def _of_diffusers(module: Any) -> list[Any]:
    """Those of group offload, the innermost first; a cache is not to be asked about a part of a pass."""
    registry = vars(module).get("_diffusers_hook")
    if registry is None:
        return []
    return [registry.hooks[name] for name in registry._hook_order if "group_offloading" in name]
