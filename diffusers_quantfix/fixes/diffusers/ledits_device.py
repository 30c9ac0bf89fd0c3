"""LEdits++ mixes devices under model offload.

Symptom: RuntimeError "Input type (CPUBFloat16Type) and weight type (CUDABFloat16Type) should be the same or input
    should be a MKLDNN tensor and weight is a dense tensor" from ``LEditsPPPipelineStableDiffusion.invert`` and that of
    Stable Diffusion XL after ``enable_model_cpu_offload()``.
Cause: they create their tensors on ``self.device``, where the weights are between two calls, and not on
    ``self._execution_device``; the VAE's ``encode`` brings its weights, but not its input.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/ledits_pp/pipeline_leditspp_stable_diffusion.py#L1397;
    not reported. ``diffusers-meta-pipeline-device`` is the same bug under sequential offload.
Patch: their ``device`` is the execution device.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve
from ...models.own_device import asks_for_its_own, becomes_execution_device

FIX = Fix(
    __doc__,
    id="diffusers-ledits-devices",
    targets=(
        Target(
            "diffusers-ledits-device",
            "diffusers.pipelines.ledits_pp.pipeline_leditspp_stable_diffusion",
            {"diffusers": ">=0.31.0,<=0.42.1"},
        ),
        Target(
            "diffusers-ledits-xl-device",
            "diffusers.pipelines.ledits_pp.pipeline_leditspp_stable_diffusion_xl",
            {"diffusers": ">=0.31.0,<=0.42.1"},
        ),
    ),
    patterns=(r"Input type \(CPU\w+\) and weight type \(CUDA\w+\) should be the same",),
    frames=(
        "pipeline_leditspp_stable_diffusion(_xl)?.py:(encode_image|invert)",
        "pipelines/ledits_pp",
        "models/autoencoders/vae.py:forward",
        "LEdits",
    ),
    since="0.1.0",
)

_CLASSES = {
    "pipeline_leditspp_stable_diffusion": "LEditsPPPipelineStableDiffusion",
    "pipeline_leditspp_stable_diffusion_xl": "LEditsPPPipelineStableDiffusionXL",
}


def broken(module: ModuleType) -> bool:
    """Does the image go to the pipeline's device, and is that another one than the execution device?"""
    return asks_for_its_own(_class(module), "encode_image")


def patch(module: ModuleType, draft: Draft) -> None:
    becomes_execution_device(draft, _class(module))


def _class(module: ModuleType) -> Any:
    return resolve(module, _CLASSES[module.__name__.rpartition(".")[2]])
