"""Quantized parameters refuse other libraries' attributes in their constructors.

Symptom: TypeError "Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized'" (the same with
    ``Int8Params``) from ``from_pretrained`` of a quantized text encoder, or when it is offloaded.
Cause: to move a quantized parameter, accelerate, transformers, diffusers and PEFT call its class with all attributes of
    the old one, ``cls(data, **old.__dict__)``. transformers 5 sets an attribute of its own on parameters, which the
    constructors do not accept.
Upstream: https://github.com/huggingface/accelerate/releases/tag/v1.14.0; patched in bitsandbytes 0.50.0
    (https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1900), whose constructors ignore unknown attributes;
    accelerate 1.14.0 removes only the transformers attribute.
Patch: the constructors behave like those of 0.50.0.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve

FIX = Fix(
    __doc__,
    id="bnb-param-kwargs",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<0.50.0"},
    patterns=(
        r"(Params4bit|Int8Params)\.__new__\(\) got an unexpected keyword argument",
        r"_is_hf_initialized\b.{1,80}(Params4bit|Int8Params)",
    ),
    frames=("accelerate/utils/modeling.py:set_module_tensor_to_device",),
    fixed_in="bitsandbytes 0.50.0",
    hot=True,
)

_NAMES = ("Params4bit", "Int8Params")


def broken(modules: ModuleType) -> bool:
    """Does a constructor reject an unknown keyword?"""
    import torch

    for name in _NAMES:
        try:
            resolve(modules, name)(torch.zeros(1), requires_grad=False, _is_hf_initialized=True)
        except TypeError:
            return True
    return False


def patch(modules: ModuleType, draft: Draft) -> None:
    def make(original):
        code = function_of(original).__code__
        known = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])

        def __new__(cls, *args, **kwargs):
            if kwargs.keys() <= known:
                return original(cls, *args, **kwargs)
            return original(cls, *args, **{name: kwargs[name] for name in kwargs.keys() & known})

        return __new__

    for name in _NAMES:
        draft.wrap_plain(resolve(modules, name), "__new__", make)
