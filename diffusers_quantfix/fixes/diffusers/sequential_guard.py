"""pipe.to("cuda") partially moves a sequentially offloaded pipeline with quantized components.

Symptom: NotImplementedError "Cannot copy out of meta tensor; no data!" from ``pipe.to("cuda")`` after
    ``enable_sequential_cpu_offload()``, with some components moved and others not, whereas the same call without
    quantized components raises "It seems like you have activated sequential model offloading".
Cause: the guard in ``DiffusionPipeline.to`` is skipped when any component was quantized by bitsandbytes, since hooks
    that only align the inputs of such a component look like offloading hooks.
Upstream: not reported; the condition came with https://github.com/huggingface/diffusers/pull/9840 (0.32.0).
Patch: check whether a component really is offloaded, and raise upstream's own error before anything moves.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models import eight_bit_pipeline, guarded
from ...offloading.hooks import is_sequentially_offloaded

FIX = Fix(
    __doc__,
    id="diffusers-sequential-guard",
    module="diffusers.pipelines.pipeline_utils",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "accelerate": ">=1.1.0", "bitsandbytes": ""},
    patterns=("Cannot copy out of meta tensor; no data",),
    frames=("pipelines/pipeline_utils.py:to", r"to_empty\(\) instead", r"pipe\w*\.to\("),
)


def broken(pipeline_utils: ModuleType) -> bool:
    """Move a pipeline with one component, 4-bit and offloaded, to a GPU, as far as the guard."""
    pipeline = resolve(pipeline_utils, "DiffusionPipeline")
    guarded.offload_refusal(pipeline)
    component = guarded.offloaded_4bit_model()
    if component is None:
        return False

    try:
        return guarded.gets_past_the_guard(pipeline, component)
    except ValueError as error:
        if guarded.OFFLOADED not in str(error):
            raise
    return False


def patch(pipeline_utils: ModuleType, draft: Draft) -> None:
    pipeline = resolve(pipeline_utils, "DiffusionPipeline")
    sentence = guarded.offload_refusal(pipeline)

    stays = eight_bit_pipeline.stays(pipeline_utils)

    def make(original):
        def to(self, *args, **kwargs):
            if guarded.guarded_device(self, args, kwargs) is not None:
                # Without a quantized component upstream raises its own error.
                moved = guarded.moved_with_bnb(self.components, pipeline_utils._check_bnb_status, stays)
                if any(map(is_sequentially_offloaded, moved.values())):
                    raise ValueError(sentence)
            return original(self, *args, **kwargs)

        return to

    draft.wrap_plain(pipeline, "to", make)
