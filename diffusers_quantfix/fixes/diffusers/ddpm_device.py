"""DDPM cannot run under model offload.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices" from
    ``DDPMPipeline`` after ``enable_model_cpu_offload()``, quantized or not.
Cause: it creates the image on ``self.device``, where its weights are between two calls, and not on
    ``self._execution_device``; what the model gives is there.
Upstream: https://github.com/huggingface/diffusers/blob/v0.40.0/src/diffusers/pipelines/ddpm/pipeline_ddpm.py#L112;
    fixed in 0.41.0.
Patch: its ``device`` is the execution device.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.own_device import asks_for_its_own, becomes_execution_device

FIX = Fix(
    __doc__,
    id="diffusers-ddpm-device",
    module="diffusers.pipelines.ddpm.pipeline_ddpm",
    claims={"diffusers": ">=0.31.0,<0.41"},
    fixed_in="diffusers 0.41.0",
    patterns=("Expected all tensors to be on the same device",),
    frames=("pipeline_ddpm.py:__call__", "schedulers/scheduling_"),
    since="0.1.0",
)


def broken(pipeline_ddpm: ModuleType) -> bool:
    """Does the image go to the pipeline's device, and is that another one than the execution device?"""
    return asks_for_its_own(resolve(pipeline_ddpm, "DDPMPipeline"), "__call__")


def patch(pipeline_ddpm: ModuleType, draft: Draft) -> None:
    becomes_execution_device(draft, resolve(pipeline_ddpm, "DDPMPipeline"))
