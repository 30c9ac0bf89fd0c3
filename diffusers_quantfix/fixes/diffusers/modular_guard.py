"""A modular pipeline moves bitsandbytes components that are offloaded or spread over several devices.

Symptom: NotImplementedError "Cannot copy out of meta tensor; no data!" from ``pipe.to("cuda")`` of a modular pipeline
    with a sequentially offloaded component, with some components moved and others not. Or RuntimeError "Expected all
    tensors to be on the same device" from every later call, when a 4-bit component was loaded with a ``device_map``
    over several devices. Without quantized components the first raises "It seems like you have activated sequential
    model offloading".
Cause: the guard in ``ModularPipeline.to`` is skipped when any component was quantized by bitsandbytes.
Upstream: not reported; the condition came with https://github.com/huggingface/diffusers/pull/9840 to
    ``DiffusionPipeline.to``, from which this one was copied (0.35.0).
Patch: such a pipeline is refused before anything moves, with upstream's own error, or with a ValueError that names the
    component. Twins: ``diffusers-sequential-guard``, ``diffusers-spread-guard``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models import guarded
from ...offloading.hooks import is_sequentially_offloaded

FIX = Fix(
    __doc__,
    id="diffusers-modular-guard",
    module="diffusers.modular_pipelines.modular_pipeline",
    claims={"diffusers": ">=0.35.0,<=0.42.1", "accelerate": ">=1.1.0", "bitsandbytes": ""},
    patterns=(
        r"modular_pipelines?.{0,4000}Cannot copy out of meta tensor; no data",
        r"\A(?=.*device_map)(?=.*modular_pipeline).*Expected all tensors to be on the same device",
    ),
    frames=("modular_pipeline.py:to", r"Modular\w*Pipeline", "modular"),
)


def broken(modular_pipeline: ModuleType) -> bool:
    """Move a pipeline with one component, 4-bit and offloaded or on two devices, to a GPU, as far as the guard."""
    pipeline = resolve(modular_pipeline, "ModularPipeline")
    guarded.offload_refusal(pipeline)
    made = guarded.offloaded_4bit_model(), guarded.spread_4bit_model()
    return any(component is not None and _gets_past(pipeline, component) for component in made)


def _gets_past(pipeline: type, component: object) -> bool:
    try:
        return guarded.gets_past_the_guard(pipeline, component)
    except ValueError:
        return False


def patch(modular_pipeline: ModuleType, draft: Draft) -> None:
    pipeline = resolve(modular_pipeline, "ModularPipeline")
    sentence = guarded.offload_refusal(pipeline)

    def make(original):
        def to(self, *args, **kwargs):
            device = guarded.guarded_device(self, args, kwargs)
            if device is not None:
                from diffusers.pipelines.pipeline_utils import _check_bnb_status

                # It leaves components in 8 bits where they are.
                moved = guarded.moved_with_bnb(self.components, _check_bnb_status, True)
                # Without a quantized component upstream raises its own error.
                if any(map(is_sequentially_offloaded, moved.values())):
                    raise ValueError(sentence)
                for name, component in moved.items():
                    guarded.refuse_spread(name, component, device)
            return original(self, *args, **kwargs)

        return to

    draft.wrap_plain(pipeline, "to", make)
