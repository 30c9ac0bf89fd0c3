"""pipe.to("cuda") accepts bitsandbytes components that are spread over several devices.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and
    cuda:1!" from every call of a pipeline after ``pipe.to("cuda:0")``, when a 4-bit or 8-bit component was loaded with
    a ``device_map`` over several devices. Without quantization the same ``to`` raises a ValueError.
Cause: the guard in ``DiffusionPipeline.to`` is not used when any component was quantized by bitsandbytes. The weights
    move, but the component's hooks still send each layer's inputs to where its weights were.
Upstream: not reported; the condition came with https://github.com/huggingface/diffusers/pull/9840 (0.32.0).
Patch: such a pipeline is refused before anything moves, with a ValueError that names the component, which may be one
    without quantization. A component in 8 bits that ``to`` leaves where it is (before 0.37.0) is not refused.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models import eight_bit_pipeline, guarded

FIX = Fix(
    __doc__,
    id="diffusers-spread-guard",
    module="diffusers.pipelines.pipeline_utils",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "accelerate": ">=1.1.0", "bitsandbytes": ""},
    patterns=(r"\A(?=.*device_map).*Expected all tensors to be on the same device",),
    frames=("device_map", r"pipe\.to\("),
)


def broken(pipeline_utils: ModuleType) -> bool:
    """Move a pipeline with one component, 4-bit and on two devices, to a GPU, as far as the guard."""
    component = guarded.spread_4bit_model()
    if component is None:
        return False

    try:
        return guarded.gets_past_the_guard(resolve(pipeline_utils, "DiffusionPipeline"), component)
    except ValueError:
        return False


def patch(pipeline_utils: ModuleType, draft: Draft) -> None:
    stays = eight_bit_pipeline.stays(pipeline_utils)

    def make(original):
        def to(self, *args, **kwargs):
            device = guarded.guarded_device(self, args, kwargs)
            if device is not None:
                moved = guarded.moved_with_bnb(self.components, pipeline_utils._check_bnb_status, stays)
                for name, component in moved.items():
                    guarded.refuse_spread(name, component, device)
            return original(self, *args, **kwargs)

        return to

    draft.wrap_plain(resolve(pipeline_utils, "DiffusionPipeline"), "to", make)
