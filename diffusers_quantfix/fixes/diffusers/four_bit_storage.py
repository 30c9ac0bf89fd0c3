"""4-bit checkpoints with a quant_storage other than uint8 cannot be loaded.

Symptom: ValueError "Expected the flattened shape of the current param (context_embedder.weight) to be torch.Size([1024,
    1]) but is (2048, 1)" from ``from_pretrained`` of a model quantized with ``bnb_4bit_quant_storage=torch.bfloat16``
    (or float16, float32), as FSDP requires.
Cause: the shape check in diffusers' 4-bit quantizer expects packed bytes in uint8 only. Without the check, loading
    would convert them to ``torch_dtype`` like any floating weight, which destroys them.
Upstream: not reported.
Patch: while a state dict is loaded, its packed weights are uint8 views; the parameter has the dtype the bytes were
    saved in.
"""

from __future__ import annotations

import sys
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-4bit-storage",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "bitsandbytes": ""},
    patterns=("Expected the flattened shape of the current param",),
    frames=("4.?bit", "quant_storage", "bnb_quantizer.py"),
    asked_once=True,
)

_QUANTIZER = "BnB4BitDiffusersQuantizer"
_LOAD = "load_model_dict_into_meta"
# Among the arguments of create_quantized_param: model, value.
_VALUE = 1
# On the view of a packed weight: the dtype it was saved in.
_SAVED_AS = "_diffusers_quantfix_saved_as"


def broken(modeling_utils: ModuleType) -> bool:
    """Check whether 128 weights may be packed in 32 elements of two bytes."""
    import torch

    bnb_quantizer = sys.modules["diffusers.quantizers.bitsandbytes.bnb_quantizer"]
    resolve(bnb_quantizer, f"{_QUANTIZER}.create_quantized_param")
    quantizer = resolve(bnb_quantizer, _QUANTIZER)
    check = quantizer.__new__(quantizer).check_quantized_param_shape
    whole, packed = torch.empty(2, 64, device="meta"), torch.empty(32, 1, dtype=torch.bfloat16, device="meta")
    try:
        check("weight", whole, packed)
    except (ValueError, AttributeError):  # up to 0.32 it expects the shapes
        return True
    return False


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    import torch

    quantizer = resolve(sys.modules["diffusers.quantizers.bitsandbytes.bnb_quantizer"], _QUANTIZER)
    home = sys.modules["diffusers.models.model_loading_utils"]
    resolve(home, _LOAD)

    def make_load(original):
        def load_model_dict_into_meta(model, state_dict, *args, **kwargs):
            loader = kwargs.get("hf_quantizer")
            if isinstance(loader, quantizer) and getattr(loader, "pre_quantized", False):
                state_dict = as_bytes(model, state_dict)
            return original(model, state_dict, *args, **kwargs)

        return load_model_dict_into_meta

    def as_bytes(model, state_dict):
        """The state dict with its packed weights as uint8."""
        from bitsandbytes.nn import Params4bit

        expected = {
            name: parameter.numel()
            for name, parameter in model.named_parameters()
            if isinstance(parameter, Params4bit)
        }
        changed = dict(state_dict)
        for name, tensor in state_dict.items():
            if name not in expected or not tensor.is_floating_point() or tensor.shape[-1] != 1:
                continue
            view = tensor.contiguous().reshape(-1).view(torch.uint8).reshape(-1, 1)
            if view.shape[0] == (expected[name] + 1) // 2:
                setattr(view, _SAVED_AS, tensor.dtype)
                changed[name] = view
        return changed

    def make_create(original):
        def create_quantized_param(self, *args, **kwargs):
            value = kwargs["param_value"] if "param_value" in kwargs else args[_VALUE]
            saved_as = getattr(value, _SAVED_AS, None)
            if saved_as is None:
                return original(self, *args, **kwargs)
            value = value.reshape(-1).view(saved_as).reshape(-1, 1)
            if "param_value" in kwargs:
                kwargs = {**kwargs, "param_value": value}
            else:
                args = (*args[:_VALUE], value, *args[_VALUE + 1 :])
            return original(self, *args, **kwargs)

        return create_quantized_param

    draft.wrap_plain(home, _LOAD, make_load)
    draft.wrap_plain(quantizer, "create_quantized_param", make_create)
