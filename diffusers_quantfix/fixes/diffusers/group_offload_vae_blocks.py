"""A VAE cannot run under block-level group offloading.

Symptom: RuntimeError "Expected all tensors to be on the same device" or "Input type (CUDABFloat16Type) and weight type
    (CPUBFloat16Type) should be the same" from ``vae.decode`` or ``vae.encode`` of Qwen-Image, LTX and most others,
    after ``enable_group_offload(offload_type="block_level")`` of the VAE or of the whole pipeline.
Cause: what is in no block is brought when the model itself is called, but a pipeline calls ``encode`` and ``decode``.
    From 0.36.0 on a class may name its parts in ``_group_offload_block_modules``; few VAEs do.
Upstream: diffusers issue 12319, open; PR 12692 gave AutoencoderKL and AutoencoderKLWan their names.
Patch: a model with ``encode`` and ``decode`` that names none has those of AutoencoderKL. What these contain is grouped
    by diffusers itself.
"""

from __future__ import annotations

from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import resolve, written_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

FIX = Fix(
    id="diffusers-group-offload-vae-blocks",
    title="a VAE cannot run under block-level group offloading",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.36.0,<=0.42.1"},
    upstream=(
        "https://github.com/huggingface/diffusers/issues/12319",
        "https://github.com/huggingface/diffusers/pull/12692",
    ),
    symptom="RuntimeError: Expected all tensors to be on the same device, or Input type and weight type should be the "
    "same, from vae.decode after enable_group_offload(offload_type='block_level')",
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
    """Offload a model with ``encode`` and ``decode``, on the CPU: is its encoder brought with the whole model only?"""
    import torch

    apply = resolve(group_offloading, "apply_group_offloading")
    if "block_modules" not in resolve(group_offloading, "GroupOffloadingConfig").__dataclass_fields__:
        raise TargetMissing("no model can name its parts here")
    model = type("Model", (torch.nn.Module,), {"encode": None, "decode": None})()
    model.encoder = torch.nn.Linear(1, 1)
    cpu = torch.device("cpu")
    try:
        apply(
            model, onload_device=cpu, offload_device=cpu, offload_type="block_level", num_blocks_per_group=1
        )
    except AttributeError:  # 0.36.0 asks for the accelerator, where there is none
        return not written_in(resolve(group_offloading, "_apply_group_offloading"), __file__)
    return not hasattr(model.encoder, "_diffusers_hook")


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    import contextlib
    from dataclasses import replace

    import torch

    block_level = group_offloading.GroupOffloadingType.BLOCK_LEVEL

    def make(original):
        def _apply_group_offloading(module, config):
            if config.offload_type == block_level and config.block_modules is None and is_autoencoder(module):
                parts = [name for name in _PARTS if module._modules.get(name) is not None]
                config = replace(config, block_modules=parts or None)
                if parts and config.stream is not None:
                    with without_the_rest(module, parts, config.offload_device):
                        return original(module, config)
            return original(module, config)

        return _apply_group_offloading

    @contextlib.contextmanager
    def without_the_rest(module, parts, device):
        """For a stream, layers are followed from the parts and once more from a model with anything beside these."""
        held = vars(module)
        before = {name: held[name] for name in ("_modules", "_parameters", "_buffers")}
        blocks = (torch.nn.ModuleList, torch.nn.Sequential)
        kept = {
            name: child
            for name, child in module._modules.items()
            if name in parts or isinstance(child, blocks)
        }
        rest = [child for name, child in module._modules.items() if child is not None and name not in kept]
        tensors = [*module._parameters.values(), *module._buffers.values()]
        held.update(_modules=kept, _parameters={}, _buffers={})
        try:
            yield
        finally:
            held.update(before)
        for child in rest:
            tensors += [*child.parameters(), *child.buffers()]
        for tensor in tensors:
            if tensor is not None:
                tensor.data = tensor.data.to(device)

    def is_autoencoder(module: Any) -> bool:
        return all(hasattr(type(module), name) for name in ("encode", "decode"))

    draft.wrap_plain(group_offloading, "_apply_group_offloading", make)
