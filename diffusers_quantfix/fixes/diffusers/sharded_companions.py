"""A quantized checkpoint in several files cannot be loaded when a file ends between a weight and its companions.

Symptom: "Supplied state dict for ... does not contain `bitsandbytes__*` and possibly other `quantized_stats`
    components" (4 bits) or "Missing quantization component `SCB`" (8 bits) from ``from_pretrained`` of a checkpoint
    that ``save_pretrained`` has written, with ``max_shard_size`` or above 10 GB.
Cause: the files are split wherever the size is reached, and read one at a time. Up to 0.32 they were merged first.
Upstream: PR 14435 mended the 8-bit part in 0.40.0; transformers issue 40327 is the twin of the 4-bit part.
Cure: what a weight needs from another file is read with it, and left out where it stands. Which keys that are is
    found in the headers of the files, before the first is read.
"""

from __future__ import annotations

from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    id="diffusers-sharded-companions",
    title="a quantized checkpoint cannot be loaded when a file ends between a weight and its quant state",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "bitsandbytes": ""},
    upstream=(
        "https://github.com/huggingface/diffusers/pull/14435",
        "https://github.com/huggingface/transformers/issues/40327",
    ),
    symptom="Supplied state dict for ... does not contain `bitsandbytes__*`; Missing quantization component `SCB`",
)

_LOAD = "_load_pretrained_model"
_FILES = 2  # among the arguments: model, state dict, files
_APART = "_quantfix_apart"


def broken(modeling_utils) -> bool:
    """Whether nothing merges the files, neither upstream nor we; a stand-in would have to write and read some."""
    load = resolve(modeling_utils, f"ModelMixin.{_LOAD}")
    if getattr(load, "_self_wrapper", None) is _with_a_look_ahead:
        return False
    return "_merge_sharded_checkpoints" not in names_used(
        resolve(modeling_utils, "ModelMixin.from_pretrained")
    )


def mend(modeling_utils, ledger) -> None:
    import sys

    def make(original):
        def load_model_dict_into_meta(model, state_dict, *args, **kwargs):
            apart = getattr(kwargs.get("hf_quantizer"), _APART, None)
            if apart:
                state_dict = brought_together(state_dict, apart)
            return original(model, state_dict, *args, **kwargs)

        return load_model_dict_into_meta

    ledger.wrap(resolve(modeling_utils, "ModelMixin"), _LOAD, _with_a_look_ahead)
    home = sys.modules["diffusers.models.model_loading_utils"]
    resolve(home, "load_model_dict_into_meta")
    ledger.around(home, "load_model_dict_into_meta", make)


def _with_a_look_ahead(wrapped, cls, args, kwargs):
    quantizer = kwargs.get("hf_quantizer")
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    files = kwargs.get("resolved_model_file", args[_FILES] if len(args) > _FILES else None)
    if getattr(method, "value", method) != "bitsandbytes" or not getattr(quantizer, "pre_quantized", False):
        return wrapped(*args, **kwargs)
    try:
        apart = companions_apart(files)
    except Exception:  # a file that cannot be read: upstream says so
        apart = {}
    if not apart:
        return wrapped(*args, **kwargs)
    setattr(quantizer, _APART, apart)  # threads that load the files at once share the quantizer
    try:
        return wrapped(*args, **kwargs)
    finally:
        delattr(quantizer, _APART)


def companions_apart(files) -> dict[str, dict[str, str]]:
    """The weights with companions in another file: name of the weight -> key of the companion -> its file.

    Args:
        files: paths; anything but several safetensors files gives an empty answer.
    """
    import os

    if not isinstance(files, (list, tuple)) or len(files) < 2:
        return {}
    if not all(isinstance(file, (str, os.PathLike)) and os.path.isfile(file) for file in files):
        return {}
    if not all(os.fspath(file).endswith(".safetensors") for file in files):
        return {}
    from safetensors import safe_open

    where = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            where.update(dict.fromkeys(opened.keys(), os.fspath(file)))
    apart: dict[str, dict[str, str]] = {}
    for key, file in where.items():
        weight = _weight_of(key)
        if where.get(weight, file) != file:
            apart.setdefault(weight, {})[key] = file
    return apart


def _weight_of(key: str) -> str:
    """The weight to which a key of a checkpoint of bitsandbytes belongs; empty for a key that is no companion's."""
    before, _, last = key.rpartition(".")
    if last in ("SCB", "weight_format"):
        return f"{before}.weight"
    if last.startswith("bitsandbytes__"):
        return before.removesuffix(".quant_state")
    return before if last in ("absmax", "quant_map", "nested_absmax", "nested_quant_map") else ""


def brought_together(state_dict, apart):
    """``state_dict`` of one file with what its weights have elsewhere, and without what belongs to weights elsewhere.

    What stays without its weight would be taken for a parameter, once the weight is loaded.
    """
    from safetensors import safe_open

    whole = {key: value for key, value in state_dict.items() if key not in apart.get(_weight_of(key), ())}
    for weight in [key for key in state_dict if key in apart]:
        for key, file in apart[weight].items():
            with safe_open(file, framework="pt") as opened:
                whole[key] = opened.get_tensor(key)
    return whole
