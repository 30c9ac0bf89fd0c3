"""A quantized text encoder cannot be loaded when a file ends between a weight and its quant state.

Symptom: "Supplied state dict for ... does not contain `bitsandbytes__*` and possibly other `quantized_stats`
    components" (4-bit) or "Missing quantization component `SCB`" (8-bit) from ``from_pretrained`` of a checkpoint
    written by ``save_pretrained`` with ``max_shard_size`` or above 5 GB.
Cause: the files are split at a given size, without regard to companions, and read one at a time; the quantizers look
    for a weight's companions only in the weight's own file.
Upstream: https://github.com/huggingface/transformers/issues/40327; from 4.57.1 on the quantizers keep the parts read so
    far until the rest is read. So does 4.57.0, which was yanked: the claim covers it, and the probe finds it healthy.
Patch: companions in another file are read together with their weight, and skipped when that other file is read. The
    keys are found in the headers of the files before the first file is read, and are passed with the paths to
    ``load_state_dict``: all releases read each file there, before any key is renamed, even in separate threads. Twin:
    ``diffusers-sharded-companions``.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...loading.shards import Apart, look_ahead, rejoined

FIX = Fix(
    __doc__,
    id="transformers-sharded-companions",
    module="transformers.modeling_utils",
    claims={"transformers": ">=4.44.2,<4.57.1", "bitsandbytes": ""},
    patterns=(r"does not contain (bitsandbytes__\*|and possibly other)", "Missing quantization component"),
    frames=("transformers/modeling_utils.py", "transformers/quantizers/"),
    fixed_in="transformers 4.57.1",
    asked_once=True,
)

_LOAD = "_load_pretrained_model"
_FILES = ("checkpoint_files", "resolved_archive_file")  # since 4.50, and before
_REFUSALS = (
    (
        "quantizer_bnb_4bit",
        "Bnb4BitHfQuantizer.create_quantized_param",
        "does not contain `bitsandbytes__*`",
    ),
    (
        "quantizer_bnb_8bit",
        "Bnb8BitHfQuantizer.check_quantized_param",
        "Missing quantization component `SCB`",
    ),
)


class _Path(str):
    """A file's path, with the companions in its checkpoint that are not in the same file as their weight."""

    apart: Apart


def broken(modeling_utils: ModuleType) -> bool:
    """Look for the quantizers' messages: calling a quantizer would import bitsandbytes."""
    resolve(modeling_utils, f"PreTrainedModel.{_LOAD}")
    return any(_says(modeling_utils, *refusal) for refusal in _REFUSALS)


def _says(modeling_utils: ModuleType, module: str, method: str, refusal: str) -> bool:
    import sys

    home = f"{modeling_utils.__name__.rpartition('.')[0]}.quantizers.{module}"
    try:
        return any(refusal in text for text in names_used(resolve(sys.modules.get(home), method)))
    except TargetMissing:  # a fixed release has no such method
        return False


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    def make_load(original):
        signature = inspect.signature(original)

        def _load_pretrained_model(*args, **kwargs):
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:  # upstream's own error
                return original(*args, **kwargs)
            name = next((name for name in _FILES if name in bound.arguments), "")
            files: Any = bound.arguments.get(name)
            apart = look_ahead(bound.arguments.get("hf_quantizer"), files)
            if not apart:
                return original(*args, **kwargs)
            bound.arguments[name] = [_with(file, apart) for file in files]
            return original(*bound.args, **bound.kwargs)

        return _load_pretrained_model

    def make(original):
        def load_state_dict(checkpoint_file, *args, **kwargs):
            state_dict = original(checkpoint_file, *args, **kwargs)
            # On meta only its keys and shapes are read.
            if not isinstance(checkpoint_file, _Path) or kwargs.get("map_location") == "meta":
                return state_dict
            return rejoined(state_dict, checkpoint_file.apart)

        return load_state_dict

    draft.wrap_plain(resolve(modeling_utils, "PreTrainedModel"), _LOAD, make_load)
    draft.wrap_plain(modeling_utils, "load_state_dict", make)


def _with(file: str, apart: Apart) -> _Path:
    path = _Path(file)
    path.apart = apart
    return path
