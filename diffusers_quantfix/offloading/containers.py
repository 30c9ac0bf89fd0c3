"""Modules that are never called: ``ParameterDict`` and ``ParameterList``, in which LoKr and LoHa keep their factors.

Code that offloads a model module by module must onload their contents when their parent is called.

Upstream: accelerate/hooks.py (``attach_align_device_hook``), peft/tuners/lokr/layer.py.
"""

from __future__ import annotations

import sys

from .hooks import accelerate_hooks, align_hooks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["bring_containers", "is_container"]


def is_container(module: Any) -> bool:
    nn = sys.modules["torch"].nn
    return isinstance(module, (nn.ParameterDict, nn.ParameterList))


def bring_containers(module: Any) -> None:
    """Give ``module`` a hook of accelerate that brings its offloaded containers before it runs, unless it has one."""
    if next(_offloaded(module), None) is None or any(
        hook.__dict__.get("pre_forward") is _bring for hook in accelerate_hooks(module)
    ):
        return
    hooks = sys.modules["accelerate.hooks"]
    hook = hooks.ModelHook()
    # Two functions and no class, which could only be made where accelerate is loaded, and not be pickled then.
    hook.pre_forward, hook.post_forward = _bring, _take_back
    hooks.add_hook_to_module(module, hook, append=True)


def _offloaded(module: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the containers right below ``module`` that an offloading hook holds, with that hook."""
    for container in module.children():
        if is_container(container):
            for hook in align_hooks(container):
                if hook.offload:
                    yield container, hook


def _bring(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    for container, hook in _offloaded(module):
        hook.pre_forward(container)
    return args, kwargs


def _take_back(module: Any, output: Any) -> Any:
    for container, hook in _offloaded(module):
        hook.post_forward(container, None)
    return output
