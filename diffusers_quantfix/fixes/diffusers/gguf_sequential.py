"""GGUF models fail under sequential offload and when copied.

Symptom: ``enable_sequential_cpu_offload()`` of a pipeline with a GGUF model, ``accelerate.cpu_offload`` and
    ``copy.deepcopy`` of such a model raise "KeyError: None".
Cause: accelerate and ``Parameter.__deepcopy__`` rebuild a parameter as ``type(parameter)(data, requires_grad=...)``.
    ``GGUFParameter.__new__`` looks up the sizes for its argument ``quant_type``, which is then None, although the data
    passed to it is a GGUFParameter with a type.
Upstream: https://github.com/huggingface/diffusers/issues/14691, https://github.com/huggingface/diffusers/pull/14698
    (open).
Patch: without a type argument, the new parameter gets its data's type, and a deep copy has all attributes. For data
    without a type upstream's error remains: the type is unknown here; data read back from disk gets it from
    `accelerate-gguf-disk`.
"""

from __future__ import annotations

import copy
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.live import gguf_on_meta as in_use  # noqa: F401

FIX = Fix(
    __doc__,
    id="diffusers-gguf-sequential",
    module="diffusers.quantizers.gguf.utils",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "gguf": ""},
    patterns=("KeyError: None",),
    frames=(
        "gguf/utils.py:__new__",
        "GGUF",
        "enable_sequential_cpu_offload",
        "accelerate/utils/modeling.py:set_module_tensor_to_device",
        "deepcopy",
    ),
    hot=True,
)


def broken(utils: ModuleType) -> bool:
    """Rebuild a one-block parameter as accelerate does."""
    import torch

    parameter_class = resolve(utils, "GGUFParameter")
    quant_type, (_, size) = next(iter(resolve(utils, "GGML_QUANT_SIZES").items()))
    parameter = parameter_class(torch.zeros(1, size, dtype=torch.uint8), quant_type=quant_type)
    try:
        rebuilt = parameter_class(parameter, requires_grad=False)
    except KeyError:
        return True
    return bool(rebuilt.quant_type != quant_type)


def patch(utils: ModuleType, draft: Draft) -> None:
    def make(original):
        def __new__(cls, data, requires_grad=False, quant_type=None):
            if quant_type is None:
                quant_type = getattr(data, "quant_type", None)
            return original(cls, data, requires_grad, quant_type)

        return __new__

    def make_deepcopy(original):
        def __deepcopy__(self, memo):
            copied = original(self, memo)
            for name, value in vars(self).items():
                vars(copied)[name] = copy.deepcopy(value, memo)
            return copied

        return __deepcopy__

    draft.wrap_plain(resolve(utils, "GGUFParameter"), "__new__", make)
    draft.wrap_plain(resolve(utils, "GGUFParameter"), "__deepcopy__", make_deepcopy)
