"""``from_pipe`` casts the components of its source pipeline.

Symptom: ``NewPipeline.from_pipe(pipe)`` casts every component of ``pipe`` to float32, with twice the memory (0.33.0 and
    newer); with a GGUF, torchao or quanto component it fails midway with "Casting a quantized model to a new `dtype` is
    unsupported". With ``torch_dtype=...`` the components of ``pipe``, which the new pipeline shares, are cast.
Cause: ``from_pipe`` ends with ``new_pipeline.to(dtype=dtype)``, where the dtype is float32 if the caller passed none.
Upstream: https://github.com/huggingface/diffusers/issues/12754, https://github.com/huggingface/diffusers/pull/12762
    (open).
Patch: without a dtype argument nothing is cast. With one, in a pipeline with a quantized component, a shared component
    of another dtype is copied, and the copy is cast. Components that already have that dtype stay shared, as do
    quantized components. With a dtype argument, pipelines without quantized components share and cast as upstream.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.task_value import TaskValue
from ...models import casting

FIX = Fix(
    __doc__,
    id="diffusers-from-pipe-cast",
    module="diffusers.pipelines.pipeline_utils",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    harm="other",
    patterns=("Casting a quantized model to a new (dtype )?is unsupported",),
    frames=("pipeline_utils.py:from_pipe", "from_pipe", r"new_pipeline\.to\("),
    asked_once=True,
)

# The dtypes to which ``from_pipe`` casts its new pipeline, in this thread or task; None outside ``from_pipe``.
_held = TaskValue(__name__, "_held")


def broken(pipeline_utils: ModuleType) -> bool:
    """Does ``from_pipe`` cast? It does in every known release."""
    from_pipe = resolve(pipeline_utils, "DiffusionPipeline.from_pipe").__func__
    while hasattr(from_pipe, "__wrapped__"):
        from_pipe = from_pipe.__wrapped__
    return "to" in from_pipe.__code__.co_names


def patch(pipeline_utils: ModuleType, draft: Draft) -> None:
    import torch

    logger = pipeline_utils.logger

    def make_to(original):
        def to(self, *args, **kwargs):
            held = _held.get()
            if held is None or args or set(kwargs) != {"dtype"}:
                return original(self, *args, **kwargs)
            held.append(kwargs["dtype"])
            return self

        return to

    def make_from_pipe(original):
        def from_pipe(cls, pipeline, **kwargs):
            named = kwargs.get("dtype") is not None or kwargs.get("torch_dtype") is not None
            token = _held.set([])
            try:
                new = original(cls, pipeline, **kwargs)
                held = _held.get()
            finally:
                _held.reset(token)
            if not named or not held:
                return new
            if not any(map(casting.is_quantized, new.components.values())):
                return new.to(dtype=held[-1])
            cast_own(new, {id(part) for part in pipeline.components.values()}, held[-1])
            return new

        return from_pipe

    def cast_own(pipeline, shared, dtype):
        for name, part in pipeline.components.items():
            if not isinstance(part, torch.nn.Module) or hasattr(part, "_diffusers_hook"):
                continue  # upstream does not cast group-offloaded models
            if casting.is_quantized(part):
                logger.warning(
                    f"The module '{type(part).__name__}' is quantized and conversion to {dtype} is not supported."
                )
            elif dtype_of(part) != dtype:
                setattr(pipeline, name, (own_copy(part) if id(part) in shared else part).to(dtype=dtype))

    def dtype_of(model):
        # If a model keeps some modules in float32, its dtype is more accurate than its parameters' dtypes.
        dtype = getattr(model, "dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
        tensors = [*model.parameters(), *model.buffers()]
        return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)

    def own_copy(model):
        """A copy with its own weights, and without the offloading hooks, which belong to the source."""
        import copy

        hooks = [vars(module)["_hf_hook"] for module in model.modules() if "_hf_hook" in vars(module)]
        # A hook may hold the next model of the chain, or all weights: it is not copied.
        own = copy.deepcopy(model, {id(hook): hook for hook in hooks})
        if hooks:
            from accelerate.hooks import remove_hook_from_module

            remove_hook_from_module(own, recurse=True)
        return own

    pipeline = resolve(pipeline_utils, "DiffusionPipeline")
    draft.wrap_plain(pipeline, "to", make_to)
    draft.wrap_plain(pipeline, "from_pipe", make_from_pipe)
