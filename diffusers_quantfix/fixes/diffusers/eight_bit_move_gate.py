"""Pipelines do not move or offload their 8-bit components.

Symptom: the warning "has been loaded in `bitsandbytes` 8bit and moving it to cpu via `.to()` is not supported. Module
    is still on" after ``pipe.to("cpu")``, and the 8-bit components stay on the GPU. From 0.37.0 on there is no warning
    if transformers is older than 4.58. ``enable_model_cpu_offload()`` skips them: they stay on the GPU all the time.
Cause: ``DiffusionPipeline.to`` and ``enable_model_cpu_offload`` skip 8-bit components: always up to 0.36.0, and later
    if bitsandbytes (< 0.48.0) or transformers is too old, although the transformers release does not matter for a
    diffusers model.
Upstream: https://github.com/huggingface/diffusers/issues/11329, https://github.com/huggingface/diffusers/pull/12972
    (0.37.0).
Patch: both methods also move the 8-bit components that can move completely (``bnb-linear8bit-move``) and bypass the
    version checks. Components that are spread over devices or offloaded are left to upstream, with its warning.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve, texts_of
from ...models import eight_bit, eight_bit_pipeline

FIX = Fix(
    __doc__,
    id="diffusers-8bit-move-gate",
    module="diffusers.pipelines.pipeline_utils",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "bitsandbytes": ">=0.43.0"},
    patterns=("has been loaded in (bitsandbytes )?8bit and moving it to .{1,20} is not supported",),
    frames=("diffusers/pipelines/pipeline_utils.py:to", "enable_model_cpu_offload", r"pipe\w*\.to\("),
    fixed_in="diffusers 0.37.0 with transformers 5.0.0 with bitsandbytes 0.48.0",
    asked_once=True,
)


def broken(pipeline_utils: ModuleType) -> bool:
    """Look for the error message, and for the versions it depends on since 0.37.0."""
    to = resolve(pipeline_utils, "DiffusionPipeline.to")
    said = texts_of(to)
    if eight_bit_pipeline.REFUSAL not in said:
        return False
    if "4.58.0" not in said:
        return True
    open_for = pipeline_utils.is_transformers_version(">", "4.58.0")
    return not (open_for and pipeline_utils.is_bitsandbytes_version(">=", "0.48.0"))


def patch(pipeline_utils: ModuleType, draft: Draft) -> None:
    def make_offload(original):
        def enable_model_cpu_offload(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            hook_what_was_skipped(self)
            return result

        return enable_model_cpu_offload

    def hook_what_was_skipped(pipe):
        """Add the 8-bit components to the chain of hooks, each of which moves the previous model to the CPU."""
        from accelerate import cpu_offload_with_hook

        hooks = {id(hook.model): hook for hook in pipe._all_hooks}
        before = None
        for name in pipe.model_cpu_offload_seq.split("->"):
            model = getattr(pipe, name, None)
            hook = hooks.get(id(model))
            if hook is not None:
                if before is not None:
                    hook.hook.prev_module_hook = before
            elif eight_bit_pipeline.movable([model]):
                try:
                    _, hook = cpu_offload_with_hook(model, pipe._offload_device, prev_module_hook=before)
                except ValueError:  # the model refuses the move: it stays on its device, as upstream
                    eight_bit.move(model, pipe._offload_device)
                    continue
                pipe._all_hooks.append(hook)
            before = hook or before

    pipeline = resolve(pipeline_utils, "DiffusionPipeline")
    eight_bit_pipeline.moves_all(pipeline_utils, "DiffusionPipeline", draft)
    draft.wrap_plain(pipeline, "enable_model_cpu_offload", make_offload)
