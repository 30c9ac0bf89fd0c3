"""Tensors that are read without a call of the module that holds them, so that sequential offload does not onload them.

``ParameterDict`` and ``ParameterList``, which hold the factors of LoKr and LoHa, are never called, and some layers have
a weight that their parent reads directly: both are onloaded when the parent is called.  A DoRA layer reads the weights
of layers that it receives as arguments: they are onloaded when it is called.  What a pipeline reads from a model
outside of a call stays on the CPU.

Upstream: accelerate/hooks.py (``attach_align_device_hook``), peft/tuners/lokr/layer.py, peft/tuners/lora/dora.py,
diffusers/models/autoencoders/vae.py, diffusers/models/autoencoders/autoencoder_kl_minimax_h3_audio.py,
diffusers/pipelines/ace_step/pipeline_ace_step.py, transformers/models/siglip2/modeling_siglip2.py.
"""

from __future__ import annotations

import sys

from .hooks import accelerate_hooks, align_hooks
from .uncompiled import uncompiled_later

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["READ", "hook_containers", "hook_passed_layers", "is_container", "keep_readable"]

# Class name of a module -> its layers whose weight it reads, without calling them or before it does
READ = {
    "MiniMaxH3AudioCausalAttention": ("qkv",),
    "Siglip2VisionEmbeddings": ("position_embedding",),
    "VectorQuantizer": ("embedding",),
}

# Class name of a model -> its tensors that only a pipeline reads
_READ_BY_PIPELINE = {"AceStepConditionEncoder": {"null_condition_emb", "silence_latent"}}

# Keyword arguments of a DoRA layer: layers whose weights it reads
_PASSED = ("base_layer", "lora_A", "lora_B")
_ONLOADED = "_quantfix_onloaded"


def is_container(module: Any) -> bool:
    nn = sys.modules["torch"].nn
    return isinstance(module, (nn.ParameterDict, nn.ParameterList))


def hook_containers(module: Any) -> None:
    """Add an accelerate hook that onloads the offloaded containers of ``module`` before it runs, unless it has one."""
    if next(_offloaded(module), None) is None or any(
        hook.__dict__.get("pre_forward") is _onload_containers for hook in accelerate_hooks(module)
    ):
        return
    hooks = sys.modules["accelerate.hooks"]
    hook = hooks.ModelHook()
    # Two functions, not a subclass: that could be defined only after accelerate is imported, and not be pickled then.
    hook.pre_forward, hook.post_forward = _onload_containers, _offload_containers
    hooks.add_hook_to_module(module, hook, append=True)


def hook_passed_layers(module: Any) -> None:
    """Add an accelerate hook to ``module``, if it is a DoRA layer, that onloads the offloaded layers it is called with.

    Its own hook must pass these on unchanged; by default it would move them as if they were tensors.
    """
    if type(module).__module__ != "peft.tuners.lora.dora":
        return
    offloading = [hook for hook in align_hooks(module) if hook.offload]
    if not offloading or any(
        hook.__dict__.get("pre_forward") is _onload_passed for hook in accelerate_hooks(module)
    ):
        return
    for hook in offloading:
        known = hook.skip_keys or ()
        hook.skip_keys = [*([known] if isinstance(known, str) else known), *_PASSED]
    hooks = sys.modules["accelerate.hooks"]
    hook = hooks.ModelHook()
    hook.pre_forward, hook.post_forward = _onload_passed, _offload_passed
    hooks.add_hook_to_module(module, hook, append=True)


def keep_readable(module: Any) -> None:
    """Put the tensors of ``module`` that only a pipeline reads back on the CPU, if an accelerate hook offloaded them.

    A module that holds other tensors too is left unchanged.
    """
    read = _READ_BY_PIPELINE.get(type(module).__name__, set())
    own = {**module._parameters, **module._buffers} if read else {}
    if not own or own.keys() - read:
        return
    for hook in align_hooks(module):
        if hook.offload:
            hook.offload = False  # it neither onloads them nor moves them back to meta
            for name, tensor in own.items():
                if tensor is not None and tensor.is_meta:
                    set_tensor = sys.modules["accelerate.hooks"].set_module_tensor_to_device
                    set_tensor(module, name, "cpu", value=hook.weights_map[name])


def _offloaded(module: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the direct child containers of ``module`` that have an offloading hook, with that hook."""
    read = READ.get(type(module).__name__, ())
    for name, container in module.named_children():
        if name in read or is_container(container):
            for hook in align_hooks(container):
                if hook.offload:
                    yield container, hook


@uncompiled_later
def _onload_containers(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    for container, hook in _offloaded(module):
        hook.pre_forward(container)
    return args, kwargs


@uncompiled_later
def _offload_containers(module: Any, output: Any) -> Any:
    for container, hook in _offloaded(module):
        hook.post_forward(container, None)
    return output


@uncompiled_later
def _onload_passed(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    onloaded = vars(module)[_ONLOADED] = []
    for name in _PASSED:
        layer = kwargs.get(name)
        if isinstance(layer, sys.modules["torch"].nn.Module):
            for hook in align_hooks(layer):
                if hook.offload:
                    hook.pre_forward(layer)
                    onloaded.append((layer, hook))
    return args, kwargs


@uncompiled_later
def _offload_passed(module: Any, output: Any) -> Any:
    for layer, hook in vars(module).pop(_ONLOADED, ()):
        hook.post_forward(layer, None)
    return output
