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
from ...engine.probe import names_used, resolve
from ...models.plain_weights import InPlaceOf
from ...offloading.hooks import accelerate_hooks

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
    cls = _class(module)
    names = names_used(resolve(cls, "encode_image"))
    return "_execution_device" not in names and "device" in names and "device" not in vars(cls)


def patch(module: ModuleType, draft: Draft) -> None:
    cls = _class(module)
    resolve(cls, "_execution_device")

    def make(upstream):
        def device(self):
            placed = super(cls, self).device
            if not any(True for part in vars(self).values() for _ in accelerate_hooks(part)):
                return placed
            # Where no hook names a device, the execution device is the pipeline's: it must not ask here again.
            return cls._execution_device.fget(InPlaceOf(self, {"device": placed}))

        return property(device, doc=upstream.__doc__)

    draft.wrap_plain(cls, "device", make)


def _class(module: ModuleType) -> Any:
    return resolve(module, _CLASSES[module.__name__.rpartition(".")[2]])
