"""Submodules that are never called: ``ParameterDict`` and ``ParameterList``, which hold the factors of LoKr and LoHa,
and layers whose weight their parent reads directly.

Sequential offload must onload their weights when their parent is called.

Upstream: accelerate/hooks.py (``attach_align_device_hook``), peft/tuners/lokr/layer.py,
diffusers/models/autoencoders/vae.py, transformers/models/siglip2/modeling_siglip2.py.
"""

from __future__ import annotations

import sys

from .hooks import accelerate_hooks, align_hooks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["bring_containers", "is_container"]

# Class name of a module -> its layers whose weight it reads without calling them
_READ = {"Siglip2VisionEmbeddings": ("position_embedding",), "VectorQuantizer": ("embedding",)}


def is_container(module: Any) -> bool:
    nn = sys.modules["torch"].nn
    return isinstance(module, (nn.ParameterDict, nn.ParameterList))


def bring_containers(module: Any) -> None:
    """Add an accelerate hook that onloads the offloaded containers of ``module`` before it runs, unless it has one."""
    if next(_offloaded(module), None) is None or any(
        hook.__dict__.get("pre_forward") is _bring for hook in accelerate_hooks(module)
    ):
        return
    hooks = sys.modules["accelerate.hooks"]
    hook = hooks.ModelHook()
    # Two functions, not a subclass: that could be defined only after accelerate is imported, and not be pickled then.
    hook.pre_forward, hook.post_forward = _bring, _take_back
    hooks.add_hook_to_module(module, hook, append=True)


def _offloaded(module: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the direct child containers of ``module`` that have an offloading hook, with that hook."""
    read = _READ.get(type(module).__name__, ())
    for name, container in module.named_children():
        if name in read or is_container(container):
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
