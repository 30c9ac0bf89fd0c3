"""Pix2Pix Zero cannot run with a quantized or group-offloaded UNet.

Symptom: RuntimeError "only Tensors of floating point dtype can require gradients" from ``prepare_unet`` of Pix2Pix
    Zero, in 4-bit or 8-bit. "Expected all tensors to be on the same device" from the ``backward()`` of its second step
    under group offload; without it, gradients as large as the UNet stay on the device.
Cause: ``prepare_unet`` makes all cross-attention weights require gradients, even quantized ones, and ``__call__``
    computes gradients of all of the UNet's weights. It only needs that of its latents.
Upstream: not reported.
Patch: ``prepare_unet`` skips quantized weights; ``__call__`` computes the gradient of the latents alone.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import exchanged, own_function

FIX = Fix(
    __doc__,
    id="diffusers-pix2pix-zero-grad",
    module="diffusers.pipelines.deprecated.stable_diffusion_variants.pipeline_stable_diffusion_pix2pix_zero",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    since="0.1.0",
    patterns=(r"only Tensors of floating point.{0,20} dtype can require gradients",),
    frames=("pipeline_stable_diffusion_pix2pix_zero.py", "Pix2PixZero"),
)

_PLAIN = (
    "[weight.requires_grad_(True) for weight in module.parameters() "
    "if type(weight) is torch.nn.Parameter and weight.is_floating_point()]"
)
_OF_ALL = "loss.loss.backward(retain_graph=False)"
_OF_THE_LATENTS = "loss.loss.backward(retain_graph=False, inputs=[x_in])"


class _Unet:
    """The probe's stand-in for a UNet with one cross attention, whose weight is packed."""

    def __init__(self, module: Any) -> None:
        self.attn_processors = {"attn2.processor": None}
        self.module = module

    def get_submodule(self, name: str) -> Any:
        return self.module

    def set_attn_processor(self, processors: Any) -> None:
        pass


def broken(module: ModuleType) -> bool:
    """Is a packed weight made to require a gradient?"""
    import torch

    attention = torch.nn.Module()
    attention.weight = torch.nn.Parameter(torch.empty(1, dtype=torch.uint8), requires_grad=False)
    try:
        resolve(module, "prepare_unet")(_Unet(attention))
    except RuntimeError:
        return True
    return False


def patch(module: ModuleType, draft: Draft) -> None:
    """Replace the code of both functions."""
    function = own_function(module, "prepare_unet")
    draft.replace(function, "__code__", exchanged(function, "module.requires_grad_(True)", _PLAIN))
    call = own_function(module, "StableDiffusionPix2PixZeroPipeline.__call__")
    draft.replace(call, "__code__", exchanged(call, _OF_ALL, _OF_THE_LATENTS))
