"""The device of a sequentially offloaded transformers model is meta.

Symptom: "NotImplementedError: Cannot copy out of meta tensor; no data!" or "Tensor on device cpu is not on the expected
    device meta!" under ``enable_sequential_cpu_offload``, from a pipeline that sends the token ids to
    ``self.text_encoder.device`` (EasyAnimate, LongCat-Image, Ideogram 4, Pix2PixZero, CogView4 before its release),
    from prompt weighting libraries, and from a model's own ``generate`` or ``forward``.
Cause: ``PreTrainedModel.device`` is the device of the first parameter. Between forward passes an accelerate hook holds
    the weights, and the parameters are meta tensors; nothing can be sent to that device.
Upstream: https://github.com/huggingface/diffusers/issues/10958; https://github.com/huggingface/diffusers/pull/11195
    patched the one pipeline that was reported. ``BarkModel.device`` reads the hook's device in the same way;
    ``generate`` works around meta in two places (PR 44848 of transformers).
Patch: the property calls upstream first. If that returns meta and an offloading hook holds the weights, it returns the
    hook's execution device, where the inputs belong. For a model without such a hook the result is unchanged, even
    meta.

Why the property, and not the pipelines' calls: see the twin, ``diffusers-meta-component-device``. We read every
condition on a model's device in 13 releases from 4.44.2 to 5.23.0; one needs meta. ``generate`` compiles the forward of
a model with a static cache if its device is a GPU. It skips an offloaded model only because meta is not a GPU.
According to transformers the compiled forward of an offloaded model crashes; elsewhere transformers detects offloading
by ``hf_device_map`` only. So ``get_compiled_call`` still returns the plain call there.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="transformers-meta-component-device",
    module="transformers.modeling_utils",
    claims={"transformers": "<=5.24.0", "accelerate": ""},
    patterns=(
        "Cannot copy out of meta tensor; no data",
        r"Tensor\.item\(\) cannot be called on meta tensors",
    ),
    frames=(
        "accelerate/utils/operations.py:send_to_device",
        "transformers/models/",
        r"text_encoder\w*\.device|get_\w*prompt_embeds|encode_prompt|CogView4",
        r"text_encoder|\bcompel\b|prompt.encod|encod\w+ (the )?prompt",
    ),
    hot=True,
)


def broken(modeling_utils: ModuleType) -> bool:
    """Does a model whose only weight is held by an offloading hook report meta as its device?"""
    from ...offloading.hooks import offloaded_stand_in

    model = offloaded_stand_in(resolve(modeling_utils, "PreTrainedModel"))
    return model is not None and model.device.type == "meta"


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    from ...offloading.hooks import device_past_meta, is_held_on_meta

    model_class = resolve(modeling_utils, "PreTrainedModel")

    def make_compiled_call(upstream):
        def get_compiled_call(self, compile_config):
            # As upstream decides for meta: no compile, unless it was requested for all devices.
            insists = getattr(compile_config, "_compile_all_devices", False)
            if not insists and is_held_on_meta(self):
                return self.__call__
            return upstream(self, compile_config)

        return get_compiled_call

    # The class that has the property: ModuleUtilsMixin, a base of PreTrainedModel.
    owner = next((cls for cls in model_class.__mro__ if "device" in vars(cls)), model_class)
    draft.wrap_plain(owner, "device", device_past_meta)
    if "get_compiled_call" in vars(model_class):  # since 4.47
        draft.wrap_plain(model_class, "get_compiled_call", make_compiled_call)
