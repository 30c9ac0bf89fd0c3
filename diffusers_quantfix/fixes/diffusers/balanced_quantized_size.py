"""device_map="balanced" measures quantized components at full precision.

Symptom: ValueError "Some modules are dispatched on the CPU or the disk" with ``device_map="balanced"``, though the
    quantized component would fit on a GPU (bitsandbytes). With quanto it raises TypeError "WeightQBytesTensor.__new__()
    missing"; with torchao the component runs from the CPU, unquantized. A quantized text encoder is put on the CPU
    without a warning.
Cause: ``_get_final_device_map`` makes its plan from models on ``meta`` in the pipeline's dtype. It ignores quantization
    configs, both the one passed and the one in a saved model's config.
Upstream: https://github.com/huggingface/diffusers/issues/12719 (open) may be this.
Patch: the ``meta`` model of a component that will be quantized gets the size that its quantizer states. A warning names
    each quantized component that still fits on no GPU: on the CPU it is slow.
"""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.interruptions import heed_interruption
from ...engine.probe import names_used, resolve
from ...engine.task_value import TaskValue
from ...loading.sizes import shrink

FIX = Fix(
    __doc__,
    id="diffusers-balanced-quantized-size",
    module="diffusers.pipelines.pipeline_utils",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    patterns=("Some modules are dispatched on the CPU or the disk",),
    frames=("balanced", "pipeline_loading_utils.py"),
    asked_once=True,
)

# The quantization config of the pipeline being loaded in this thread or task.
_asked = TaskValue(__name__, "_asked")
# While the plan is made: the names of its components measured as quantized; otherwise None.
_measured = TaskValue(__name__, "_measured")

_KNOWS = {"quantization_config", "hf_quantizer", "quantizer", "adjust_target_dtype"}


def broken(pipeline_utils: ModuleType) -> bool:
    """Whether the functions that make the plan do not mention quantization."""
    home = _home()
    for function in (resolve(home, "_get_final_device_map"), resolve(home, "_load_empty_model")):
        if _KNOWS & names_used(function):
            return False
    return True


def patch(pipeline_utils: ModuleType, draft: Draft) -> None:
    home = _home()
    logger = pipeline_utils.logger

    def make_from_pretrained(original):
        def from_pretrained(cls, *args, **kwargs):
            token = _asked.set(kwargs.get("quantization_config"))
            try:
                return original(cls, *args, **kwargs)
            finally:
                _asked.reset(token)

        return from_pretrained

    def planned(original, _, args, kwargs):
        token = _measured.set([])
        try:
            plan = original(*args, **kwargs)
            measured = _measured.get() or []
        finally:
            _measured.reset(token)
        slow = [name for name in measured if isinstance(plan, dict) and plan.get(name) == "cpu"]
        if slow:
            logger.warning(
                f'device_map="balanced" finds no GPU with room for {", ".join(slow)}, quantized as asked. On the '
                "CPU every layer is copied to a GPU for each use, which is slow: pass a larger max_memory, free "
                "memory on the GPUs, or quantize to fewer bits."
            )
        return plan

    def shrunk(original, _, args, kwargs):
        model = original(*args, **kwargs)
        measured = _measured.get()
        if model is None or measured is None or not {"name", "cached_folder"} <= kwargs.keys():
            return model
        try:
            config = quantization_of(model, kwargs["name"], kwargs["cached_folder"])
            if config is not None and shrink(model, config):
                measured.append(kwargs["name"])
        except Exception as error:  # loading itself reports the error, or does not need the size
            heed_interruption(error)
            logger.debug(f"the quantized size of {kwargs['name']} is not known: {error!r}")
        return model

    draft.wrap_plain(resolve(pipeline_utils, "DiffusionPipeline"), "from_pretrained", make_from_pretrained)
    draft.wrap_wrapt(home, "_get_final_device_map", planned)
    draft.wrap_wrapt(home, "_load_empty_model", shrunk)


def quantization_of(model: Any, name: str, folder: str) -> Any:
    """A component's quantization config: its own if it was saved quantized, else the pipeline's config for it."""
    import json
    import os

    file = os.path.join(folder, name, "config.json")
    if os.path.isfile(file):
        with open(file, encoding="utf-8") as opened:
            own = json.load(opened).get("quantization_config")
        if own is not None:
            return own
    asked = _asked.get()
    if not hasattr(asked, "_resolve_quant_config"):
        return None
    from diffusers import ModelMixin

    # A copy, because it records every answer.
    return copy.copy(asked)._resolve_quant_config(
        is_diffusers=isinstance(model, ModelMixin), module_name=name
    )


def _home() -> ModuleType:
    return sys.modules["diffusers.pipelines.pipeline_loading_utils"]
