"""``device_map`` of a pipeline ignores components that are passed to it.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and
    cuda:1!" (or "and cpu!") from ``Pipeline.from_pretrained(..., transformer=transformer, device_map="balanced")``.
    Without an error, ``pipe.hf_device_map`` names a GPU that the component is not on. A passed component of quanto,
    torchao, GGUF or in full precision stays on the CPU, also with ``device_map="cuda"``.
Cause: ``from_pretrained`` plans a place for every component of ``model_index.json``, dispatches the components that it
    loads itself, with hooks that bring their inputs to them, and takes those that are passed as they are.
Upstream: https://github.com/huggingface/diffusers/issues/9450 (closed without a fix).
Patch: a passed component that is on a GPU stays there, and the plan says so; one on the CPU goes where the plan says.
    Both get the hooks of the others. Components that are not in ``model_index.json`` (a ControlNet) are planned too. A
    component that is offloaded, or spread over devices, is left as it is.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...engine.task_value import TaskValue
from ...models.compiled import uncompiled
from ...offloading.hooks import accelerate_hooks, is_group_offloaded

FIX = Fix(
    __doc__,
    id="diffusers-balanced-passed-component",
    module="diffusers.pipelines.pipeline_utils",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "accelerate": ""},
    patterns=(
        r"\A(?=.*\b(?:transformer|unet|vae|text_encoder\w{0,2}|controlnet)=\w[^)]{0,300}device_map=\W(?:balanced|cuda))"
        r".*(?:Expected all tensors to be on the same device|Input tensors need to be on the same GPU)",
    ),
    frames=("balanced", "hf_device_map"),
    since="0.1.0",
    asked_once=True,
)

# The components passed to the pipeline being loaded in this thread or task.
_passed = TaskValue(__name__, "_passed")


def broken(pipeline_utils: ModuleType) -> bool:
    """Whether neither the loading of a pipeline nor its plan looks at the device of a component."""
    load = resolve(pipeline_utils, "DiffusionPipeline.from_pretrained")
    plan = resolve(_home(), "_get_final_device_map")
    used = names_used(load) | names_used(plan)
    return not {"dispatch_model", "device"} & used


def patch(pipeline_utils: ModuleType, draft: Draft) -> None:

    def make_from_pretrained(original):
        def from_pretrained(cls, *args, **kwargs):
            if not isinstance(kwargs.get("device_map"), str) or not (passed := models_in(kwargs)):
                return original(cls, *args, **kwargs)
            token = _passed.set(passed)
            try:
                pipeline = original(cls, *args, **kwargs)
            finally:
                _passed.reset(token)
            for name in passed:
                put_in_place(pipeline, name)
            return pipeline

        return from_pretrained

    def planned(original, _, args, kwargs):
        passed = _passed.get()
        if not passed:
            return original(*args, **kwargs)
        sizes, *others = args
        places = {name: place_of(models) for name, models in passed.items()}
        sizes = {name: size for name, size in sizes.items() if places.get(name) is None}
        for name in passed.keys() - sizes.keys():
            if places[name] is None:
                sizes[name] = size_of(passed[name])
        sizes = dict(sorted(sizes.items(), key=lambda item: item[1], reverse=True))
        plan = original(sizes, *others, **kwargs)
        for name, place in places.items():
            if place is not None:
                plan.setdefault(place, []).append(name)
        return plan

    draft.wrap_plain(resolve(pipeline_utils, "DiffusionPipeline"), "from_pretrained", make_from_pretrained)
    draft.wrap_wrapt(_home(), "_assign_components_to_devices", planned)


def models_in(arguments: dict[str, Any]) -> dict[str, list[Any]]:
    """The models among the arguments of ``from_pretrained``; a list of ControlNets is one component."""
    from torch.nn import Module

    found = {}
    for name, value in arguments.items():
        models = list(value) if isinstance(value, (list, tuple)) else [value]
        if models and all(isinstance(model, Module) for model in models):
            found[name] = models
    return found


def place_of(models: list[Any]) -> int | str | None:
    """Where a component stays, as a key of ``max_memory``; None if it is to be placed."""
    place: int | str | None = None
    for model in models:
        if moves_itself(model):
            place = "cpu"
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type not in ("cpu", "meta"):
                index = tensor.device.index
                return str(tensor.device.type) if index is None else int(index)
    return place


def size_of(models: list[Any]) -> int:
    from accelerate.utils import compute_module_sizes

    return sum(compute_module_sizes(model)[""] for model in models)


def moves_itself(model: Any) -> bool:
    """Whether hooks already bring this model and its inputs together."""
    return is_group_offloaded(model) or any(any(accelerate_hooks(module)) for module in model.modules())


def put_in_place(pipeline: Any, name: str) -> None:
    """Dispatch the component ``name`` as upstream dispatches those that it loads."""
    import torch
    from accelerate import dispatch_model

    plan = pipeline.hf_device_map
    model = getattr(pipeline, name, None)
    model = uncompiled(model)
    if not isinstance(model, torch.nn.Module):
        if isinstance(plan, dict):
            plan.pop(name, None)
        return
    if moves_itself(model):
        return
    if isinstance(plan, str):
        if place_of([model]) is None:
            model.to(plan)
        return
    if not plan or name not in plan:
        return
    options: dict[str, Any] = {"skip_keys": getattr(model, "_skip_keys", None)}
    if plan[name] == "cpu":
        options |= {"state_dict": model.state_dict(), "main_device": 0}
    dispatch_model(model, device_map={"": plan[name]}, force_hooks=True, **options)


def _home() -> ModuleType:
    return sys.modules["diffusers.pipelines.pipeline_loading_utils"]
