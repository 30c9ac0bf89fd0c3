"""The device of a sequentially offloaded diffusers model is meta.

Symptom: "NotImplementedError: Cannot copy out of meta tensor; no data!" or "Tensor on device cpu is not on the expected
    device meta!" under ``enable_sequential_cpu_offload``, from a pipeline that sends a tensor to ``self.vae.device``
    (GLIGEN), or from code that does so outside a pipeline.
Cause: ``ModelMixin.device`` is the device of the first parameter. Between forward passes an accelerate hook holds the
    weights, and the parameters are meta tensors; nothing can be sent to that device.
Upstream: https://github.com/huggingface/diffusers/issues/10958, https://github.com/aigc-apps/EasyAnimate/issues/185;
    https://github.com/huggingface/diffusers/pull/11195 patched the one pipeline that was reported. Where diffusers
    itself offloads (group offloading) this property already returns the hook's device; so does ``BarkModel.device`` of
    transformers for accelerate's hooks, and ``get_module_execution_device`` of diffusers 0.41, which a few pipelines
    call instead.
Patch: the property calls upstream first. If that returns meta and an offloading hook holds the weights, it returns the
    hook's execution device, where the inputs belong. For a model without such a hook the result is unchanged, even
    meta.

Why the property, and not the pipelines' calls: prompt weighting libraries and user code read
``pipe.text_encoder.device`` outside any call. We read every condition on a model's device in 12 releases from 0.31.0 to
0.42.1. Only ``DiffusionPipeline.device`` treats meta differently; see ``diffusers-meta-pipeline-device``.
``_execution_device`` reads the hooks, ``enable_*_offload`` remove the hooks before they read the device, ``.to`` only
prints it, and loading reads it before there are hooks. ``model.to(model.device)`` of an offloaded model, as in loading
an IP-Adapter, now fails at once; upstream moves the adapter's fresh weights to meta, where they are lost, and the run
fails. Two narrower patches were rejected. Inside pipeline calls only: libraries and user code that read the device
outside a call would fail as before, and the result would depend on the caller. Only in the pipelines known to read it:
each release adds new ones. Five of upstream's own tests assert meta to detect offloading; they fail with this fix.
Programs that need this should check ``next(model.parameters()).is_meta``, or skip this fix and its twin.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve, written_in
from ...engine.target import finished

FIX = Fix(
    __doc__,
    id="diffusers-meta-component-device",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": "<=0.42.1", "accelerate": ""},
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


_LAZY = "diffusers.hooks.group_offloading"


def broken(modeling_utils: ModuleType) -> bool:
    """Does a model whose only weight is held by an offloading hook report meta as its device?"""
    from ...offloading import hooks

    mixin = resolve(modeling_utils, "ModelMixin")
    names = names_used(resolve(modeling_utils, "get_parameter_device"))
    if _LAZY.partition(".")[2] in names and finished(_LAZY) is None:
        # Upstream would import its hooks for the answer, and with them the whole of transformers.
        asked = getattr(resolve(mixin, "device"), "fget", None)
        return "_hf_hook" not in names and not written_in(asked, hooks.__name__)
    model = hooks.offloaded_stand_in(mixin)
    return model is not None and model.device.type == "meta"


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    from ...offloading.hooks import device_past_meta

    draft.wrap_plain(resolve(modeling_utils, "ModelMixin"), "device", device_past_meta)
