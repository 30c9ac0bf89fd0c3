"""A diffusers model that accelerate offloads says that it is on ``meta``.

Symptom: "NotImplementedError: Cannot copy out of meta tensor; no data!" or "Tensor on device cpu is not on the
expected device meta!" under ``enable_sequential_cpu_offload``, from a pipeline that sends a tensor to
``self.vae.device`` (GLIGEN), or from code that does so outside of a pipeline.
Cause: ``ModelMixin.device`` is the device of the first parameter. Between two forward passes a hook of accelerate
holds the weights and leaves meta tensors in their place, where nothing can be sent.
Upstream: diffusers issue 10958; PR 11195 patched the one pipeline that was reported. Where diffusers offloads by itself
(group offloading) this property already gives the device of the hook; so does ``BarkModel.device`` of transformers for
accelerate's hooks, and ``get_module_execution_device`` of diffusers 0.41, which a few pipelines call instead.
Patch: the property asks upstream first; where the answer is meta and an offloading hook holds the weights, it gives the
hook's execution device, where the inputs belong. A model without such a hook keeps its answer, meta too.

Why the property, and not the calls of pipelines: prompt weighting libraries and user code read
``pipe.text_encoder.device`` outside of any call. Every condition on a model's device was read, in 12 releases from
0.31.0 to 0.42.1. Only ``DiffusionPipeline.device`` makes a difference of meta; see ``diffusers-meta-pipeline-device``.
``_execution_device`` asks the hooks, ``enable_*_offload`` remove the hooks before they look, ``.to`` only prints it,
loading looks before there are hooks. ``model.to(model.device)`` of an offloaded model, as in loading an IP-Adapter,
now fails at once; upstream moves the adapter's fresh weights to meta, where they are lost, and the run fails.
A narrower patch was weighed once more. Inside of pipeline calls only: the libraries and the user code that read it
outside would fail as before, and the answer would depend on who asks. Only the pipelines that are known to read it:
new ones come with each release. Five of upstream's own tests assert meta as the sign of offloading; they fail with
this fix. Programs that need that sign should ask ``next(model.parameters()).is_meta``, or skip this fix and its twin.
"""

from __future__ import annotations

from ...engine.fix import Fix
from ...engine.probe import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from ...engine.draft import Draft

FIX = Fix(
    id="diffusers-meta-component-device",
    title="the device of a sequentially offloaded diffusers model is meta",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": "<=0.42.1", "accelerate": ""},
    upstream=(
        "https://github.com/huggingface/diffusers/issues/10958",
        "https://github.com/huggingface/diffusers/pull/11195",
    ),
    symptom="Cannot copy out of meta tensor; no data!",
    patterns=(
        "Cannot copy out of meta tensor; no data",
        r"Tensor\.item\(\) cannot be called on meta tensors",
    ),
    frames=(
        "accelerate/utils/operations.py:send_to_device",
        "diffusers/models/",
        r"(vae|transformer|unet|controlnet)\.device",
    ),
    hot=True,
)


def broken(modeling_utils: ModuleType) -> bool:
    """Does a model whose only weight is held by an offloading hook say that it is on meta?"""
    from ...offloading.hooks import offloaded_stand_in

    model = offloaded_stand_in(resolve(modeling_utils, "ModelMixin"))
    return model is not None and model.device.type == "meta"


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    from ...offloading.hooks import device_past_meta

    draft.wrap_plain(resolve(modeling_utils, "ModelMixin"), "device", device_past_meta)
