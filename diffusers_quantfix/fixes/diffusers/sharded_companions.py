"""A quantized checkpoint cannot be loaded when a file ends between a weight and its quant state.

Symptom: "Supplied state dict for ... does not contain `bitsandbytes__*` and possibly other `quantized_stats`
    components" (4-bit) or "Missing quantization component `SCB`" (8-bit) from ``from_pretrained`` of a checkpoint
    written by ``save_pretrained`` with ``max_shard_size`` or above 10 GB.
Cause: the files are split at a given size, without regard to companions, and read one at a time. Up to 0.32 they were
    merged first.
Upstream: https://github.com/huggingface/diffusers/pull/14435 patched the 8-bit part in 0.40.0;
    https://github.com/huggingface/transformers/issues/40327 is the same bug there.
Patch: companions in another file are read together with their weight, and skipped when that other file is read. The
    keys are found in the headers of the files before the first file is read. Twin: ``transformers-sharded-companions``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...loading.shards import look_ahead, rejoined

FIX = Fix(
    __doc__,
    id="diffusers-sharded-companions",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "bitsandbytes": ""},
    patterns=(r"does not contain (bitsandbytes__\*|and possibly other)", "Missing quantization component"),
    frames=(
        "diffusers/models/model_loading_utils.py",
        "diffusers/models/modeling_utils.py:from_pretrained",
        "bnb_quantizer.py",
    ),
    asked_once=True,
)

_LOAD = "_load_pretrained_model"
_FILES = 2  # among the arguments: model, state dict, files
_APART = "_quantfix_apart"


def broken(modeling_utils: ModuleType) -> bool:
    """Does upstream not merge the files? A stand-in would have to write and read files."""
    resolve(modeling_utils, f"ModelMixin.{_LOAD}")
    return "_merge_sharded_checkpoints" not in names_used(
        resolve(modeling_utils, "ModelMixin.from_pretrained")
    )


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    import sys

    def make_load(original):
        def _load_pretrained_model(cls, *args, **kwargs):
            quantizer = kwargs.get("hf_quantizer")
            files = kwargs.get("resolved_model_file", args[_FILES] if len(args) > _FILES else None)
            apart = look_ahead(quantizer, files)
            if not apart:
                return original(cls, *args, **kwargs)
            setattr(quantizer, _APART, apart)  # threads that load the files in parallel share the quantizer
            try:
                return original(cls, *args, **kwargs)
            finally:
                delattr(quantizer, _APART)

        return _load_pretrained_model

    def make(original):
        def load_model_dict_into_meta(model, state_dict, *args, **kwargs):
            apart = getattr(kwargs.get("hf_quantizer"), _APART, None)
            if apart:
                state_dict = rejoined(state_dict, apart)
            return original(model, state_dict, *args, **kwargs)

        return load_model_dict_into_meta

    draft.wrap_plain(resolve(modeling_utils, "ModelMixin"), _LOAD, make_load)
    home = sys.modules["diffusers.models.model_loading_utils"]
    resolve(home, "load_model_dict_into_meta")
    draft.wrap_plain(home, "load_model_dict_into_meta", make)
