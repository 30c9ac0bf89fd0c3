"""An offloaded model with tied weights cannot be saved.

Symptom: RuntimeError "Some tensors share memory, this will lead to duplicate memory on disk and potential differences
    when loading them again: [{'lm_head.weight', 'transformer.wte.weight'}]" from ``save_pretrained`` of a text encoder
    that was loaded with a ``device_map`` or quantized, and is sequentially offloaded.
Cause: for a model that has an ``hf_device_map``, ``save_pretrained`` leaves out only the shared tensors that
    ``find_tied_parameters`` names, which compares the parameters themselves; an offloaded module has others.
Upstream: https://github.com/huggingface/transformers/pull/39263, in 4.54.0, compares what is saved.
Patch: for such a model the parameters that its class declares as tied are named, too. Of those only the ones that
    share memory in what is saved are left out.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...offloading.hooks import is_sequentially_offloaded, is_spread

FIX = Fix(
    __doc__,
    id="transformers-save-offloaded-tied",
    module="transformers.modeling_utils",
    claims={"transformers": ">=4.44.2,<4.54", "accelerate": ""},
    patterns=("Some tensors share memory, this will lead to duplicate memory on disk",),
    frames=("modeling_utils.py:save_pretrained", "lm_head", "offload"),
    fixed_in="transformers 4.54.0",
    asked_once=True,
    since="0.1.0",
)


def broken(modeling_utils: ModuleType) -> bool:
    """Does ``save_pretrained`` ask ``find_tied_parameters``?"""
    return "find_tied_parameters" in names_used(resolve(modeling_utils, "PreTrainedModel.save_pretrained"))


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    declared_keys = resolve(modeling_utils, "_get_tied_weight_keys")

    def make(original):
        def find_tied_parameters(model, *args, **kwargs):
            found = original(model, *args, **kwargs)
            # Of a model that is spread, the state dict has no data yet: upstream reads it shard by shard.
            if not is_sequentially_offloaded(model) or is_spread(model):
                return found
            names = {name for group in found for name in group} | declared(model)
            return [sorted(names)] if names else found  # upstream reads the first group only

        return find_tied_parameters

    def declared(model):
        import re

        patterns = declared_keys(model) or ()
        names = dict(model.named_parameters(remove_duplicate=False))
        return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}

    draft.wrap_plain(modeling_utils, "find_tied_parameters", make)
