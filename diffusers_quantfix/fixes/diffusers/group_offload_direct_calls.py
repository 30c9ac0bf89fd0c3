"""Block-level group offloading leaves a layer that is called directly on the CPU.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    after ``enable_group_offload(offload_type="block_level")``: from ``text_encoder.get_input_embeddings()`` (ACE-Step),
    ``language_model.model.embed_tokens`` (MiniMax Music 3), ``get_text_features`` of CLAP (AudioLDM 2),
    ``text_encoder.text_projection`` (Versatile Diffusion), ``decode`` of LTX 2.5's diffusion decoder, and
    ``text_model.final_layer_norm`` of CLIP (I2VGen-XL; with ``clip_skip`` all of Stable Diffusion).
Cause: all children of a model that are not blocks form one group, which is onloaded when the model's ``forward`` is
    called, and offloaded after it.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L793; not
    reported.
Patch: a call of such a child, or of the embedding of a language model or CLIP's last norm, wherever they are in the
    group, onloads the group if it is offloaded, and offloads it again afterwards.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve, written_in
from ...offloading.direct_calls import DirectCall, forget_direct_call
from ...offloading.hooks import child_hooks, take_off_child_hooks
from ...offloading.trial import offloads_on_cpu

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-direct-calls",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    patterns=(
        r"(get_text_features|embed_layer|text_projection|final_layer_norm|ltx2_diffusion_decoder).{0,4000}"
        r"Expected all tensors to be on the same device",
    ),
    frames=(
        "get_text_features|get_input_embeddings|text_projection|embed_layer|final_layer_norm",
        "ltx2_diffusion_decoder",
        "modeling_clap.py:get_text_features",
        "pipeline_audioldm2.py:encode_prompt",
        "group_offload",
        "block_level",
    ),
    since="0.1.0",
    hot=True,
)


def broken(group_offloading: ModuleType) -> bool:
    """Offload a model with a layer, on the CPU: is the layer onloaded only with the whole model?"""
    import torch

    model = torch.nn.Module()
    model.layer = torch.nn.Linear(1, 1)
    if not offloads_on_cpu(group_offloading, model, "block_level"):
        return not written_in(resolve(group_offloading, "_apply_group_offloading_block_level"), __name__)
    return not hasattr(model.layer, "_diffusers_hook") and not model.layer._forward_pre_hooks


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    hook_class = resolve(group_offloading, "GroupOffloadingHook")

    def make_apply(original):
        def _apply_group_offloading_block_level(module, *args, **kwargs):
            original(module, *args, **kwargs)
            registry = getattr(module, "_diffusers_hook", None)
            hook = registry and registry.get_hook("group_offloading")
            if hook is not None and hook.group.offload_leader is module:
                handles = child_hooks(hook)
                hook.fn_ref.pre_forward = partial(before_all, hook, hook.fn_ref.pre_forward)
                for child in hook.group.modules:
                    handles += DirectCall(hook).register(child)
                    for layer in called_alone_in(child, module):
                        handles += DirectCall(hook, child).register(layer)

        return _apply_group_offloading_block_level

    def make_deinitialize(original):
        def deinitalize_hook(self, module):
            take_off_child_hooks(self)
            return original(self, module)

        return deinitalize_hook

    draft.wrap_plain(group_offloading, "_apply_group_offloading_block_level", make_apply)
    draft.wrap_plain(hook_class, "deinitalize_hook", make_deinitialize)


def called_alone_in(child: Any, model: Any) -> list[Any]:
    """The layers of ``child`` that pipelines call alone: the embedding, and the last norm of CLIP."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # no model of transformers, or one without text
        return []
    norm = getattr(getattr(model, "text_model", None), "final_layer_norm", None)
    called = {id(layer) for layer in (embedding, norm) if layer is not None}
    return [layer for layer in child.modules() if id(layer) in called and layer is not child]


def before_all(hook: Any, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    forget_direct_call(hook.group)
    return original(module, *args, **kwargs)
