"""A quantized model with a LoRA is saved in a form that cannot be loaded.

Symptom: after ``load_lora_weights()``, with or without ``fuse_lora()``, ``transformer.save_pretrained()`` of a
    quantized model writes a checkpoint that loads with only warnings ("Some weights of the model checkpoint were not
    used") and leaves the layers with the LoRA on ``meta``: "Cannot copy out of meta tensor; no data!".
Cause: peft wraps the model's layers in its own, so that their names in the state dict contain ``base_layer``.
    ``ModelMixin.save_pretrained`` writes the names as they are; no loader looks for them.
Upstream: not reported; the situation is that of https://github.com/huggingface/diffusers/issues/10496. Plain models are
    saved the same way.
Patch: after ``fuse_lora()`` the merged weights are saved under the model's names. This would lose an unmerged LoRA: an
    error says so before anything is written. Unquantized models are saved as before.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...weights.method import method_of

FIX = Fix(
    __doc__,
    id="diffusers-save-with-lora",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "peft": ""},
    since="0.1.0",
    patterns=(r"Some weights of the model checkpoint .{0,400}base_layer",),
    frames=("base_layer",),
    asked_once=True,
)

NOT_MERGED = (
    "the checkpoint would not contain the LoRA of this quantized model, and could not be loaded: save the LoRA with "
    "save_lora_adapter() and call unload_lora_weights() before save_pretrained(), or merge it with fuse_lora()"
)


def broken(modeling_utils: ModuleType) -> bool:
    """Does ``save_pretrained`` write the names of the state dict without checking for peft's?"""
    save = resolve(modeling_utils, "ModelMixin.save_pretrained")
    names = names_used(save)
    return "state_dict" in names and not names & {"base_layer", "get_base_layer", "get_base_model_state_dict"}


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    def make(original):
        def save_pretrained(self, *args, **kwargs):
            layers = adapter_layers(self) if method_of(self) else {}
            if not layers:
                return original(self, *args, **kwargs)
            if not all(layer.merged for layer in layers.values()):
                raise ValueError(NOT_MERGED)
            handle = self.register_state_dict_post_hook(under_their_own_names(layers))
            try:
                return original(self, *args, **kwargs)
            finally:
                handle.remove()

        return save_pretrained

    draft.wrap_plain(resolve(modeling_utils, "ModelMixin"), "save_pretrained", make)


def adapter_layers(model: Any) -> dict[str, Any]:
    """peft's layers in ``model``, by name."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return {}
    return {name: one for name, one in model.named_modules() if isinstance(one, tuners.BaseTunerLayer)}


def under_their_own_names(layers: dict[str, Any]) -> Any:
    """A hook that keeps only the base layer of each of ``layers`` in a state dict, under the layer's name."""

    def hook(module: Any, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        for key in list(state_dict):
            paths = itertools.accumulate(key[len(prefix) :].split("."), "{}.{}".format)
            owner = next((path for path in paths if path in layers), None)
            if owner is None:
                continue
            value, rest = state_dict.pop(key), key[len(prefix) + len(owner) + 1 :]
            if rest.startswith("base_layer."):
                state_dict[f"{prefix}{owner}.{rest.removeprefix('base_layer.')}"] = value

    return hook
