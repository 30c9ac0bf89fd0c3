"""A VAE cannot run under block-level group offloading.

Symptom: RuntimeError "Expected all tensors to be on the same device" or "Input type (CUDABFloat16Type) and weight type
    (CPUBFloat16Type) should be the same" from ``vae.decode`` or ``vae.encode`` of Qwen-Image, LTX and most others,
    after ``enable_group_offload(offload_type="block_level")`` of the VAE or of the whole pipeline.
Cause: modules in no block are onloaded when the model itself is called, but a pipeline calls ``encode`` and ``decode``.
    From 0.36.0 on a class may name its parts in ``_group_offload_block_modules``; few VAEs do.
Upstream: https://github.com/huggingface/diffusers/issues/12319, open;
    https://github.com/huggingface/diffusers/pull/12692 added these names to AutoencoderKL and AutoencoderKLWan.
Patch: a diffusers model with ``encode`` and ``decode`` that names no parts gets those of AutoencoderKL. diffusers
    itself groups what these contain. Models from elsewhere are left alone, since they may access their parts directly,
    and so is a part that is a ModuleList or Sequential: its layers already are blocks.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import resolve, written_in
from ...finishing import holding
from ...offloading.trial import offloads_on_cpu

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-vae-blocks",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.36.0,<=0.42.1"},
    patterns=(
        "Expected all tensors to be on the same device",
        r"Input type \(\S+\) and weight type \(\S+\) should be the same",
    ),
    frames=("models/autoencoders/", r"\b_?(de|en)code\b", "post_quant_conv", "group_offload", "block_level"),
    since="0.1.0",
)

# Of AutoencoderKL and AutoencoderKLWan.
_PARTS = ("quant_conv", "post_quant_conv", "encoder", "decoder")


def broken(group_offloading: ModuleType) -> bool:
    """Offload a model with ``encode`` and ``decode``, on the CPU: is its encoder onloaded only with the whole model?"""
    import torch

    if "block_modules" not in resolve(group_offloading, "GroupOffloadingConfig").__dataclass_fields__:
        raise TargetMissing("no model can name its parts here")
    names = {"encode": None, "decode": None, "__module__": group_offloading.__name__}
    model = type("Model", (torch.nn.Module,), names)()
    model.encoder = torch.nn.Linear(1, 1)
    if not offloads_on_cpu(group_offloading, model, "block_level"):
        return not written_in(resolve(group_offloading, "_apply_group_offloading"), __name__)
    return not hasattr(model.encoder, "_diffusers_hook")


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    from dataclasses import replace

    import torch

    block_level = group_offloading.GroupOffloadingType.BLOCK_LEVEL
    library = group_offloading.__name__.partition(".")[0]
    blocks = (torch.nn.ModuleList, torch.nn.Sequential)

    def make(original):
        def _apply_group_offloading(module, config):
            parts = parts_of(module) if config.offload_type == block_level else []
            # Already set when diffusers removes the hooks and applies them again, as after loading a LoRA.
            if not parts or (config.block_modules is not None and set(config.block_modules) != set(parts)):
                return original(module, config)
            config = replace(config, block_modules=parts)
            rest = {
                name: child
                for name, child in module._modules.items()
                if child is not None and name not in parts and not isinstance(child, blocks)
            }
            if config.stream is None or not (rest or module._parameters or module._buffers):
                return original(module, config)
            # With a stream, layers would be tracked from the parts and again from the model: the rest, which is used
            # when the model itself is called, is onloaded without one.
            kept = {name: child for name, child in module._modules.items() if name not in rest}
            with holding(module, _modules=kept, _parameters={}, _buffers={}):
                original(module, config)
            with holding(module, _modules=rest):
                original(module, replace(config, stream=None, block_modules=None))
            registry = getattr(module, "_diffusers_hook", None)
            hook = registry and registry.get_hook(group_offloading._GROUP_OFFLOADING)
            if hook is not None:
                hook.config = config  # used when the hooks are applied again
            return None

        return _apply_group_offloading

    def parts_of(module: Any) -> list[str]:
        """The names of the parts; none if it is not one of the library's autoencoders."""
        if not any(
            {"encode", "decode"} <= vars(cls).keys() and cls.__module__.partition(".")[0] == library
            for cls in type(module).__mro__
        ):
            return []
        return [
            name
            for name in _PARTS
            if module._modules.get(name) is not None and not isinstance(module._modules[name], blocks)
        ]

    draft.wrap_plain(group_offloading, "_apply_group_offloading", make)
