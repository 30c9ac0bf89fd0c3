"""An 8-bit checkpoint cannot be loaded if the class ignores keys of modules that it has.

Symptom: ValueError "list.remove(x): x not in list", from ``from_pretrained`` of an 8-bit checkpoint. AltDiffusion's
    text encoder is one such class: it has a pooler, and ignores what matches ``pooler``.
Cause: ``Bnb8BitHfQuantizer.create_quantized_param`` removes a weight's scales from the list of unexpected keys; those
    that match ``_keys_to_ignore_on_load_unexpected`` are already gone. The 4-bit quantizer checks first.
Upstream: not reported; transformers 4.57.1 loads differently. So does 4.57.0, which was yanked: the claim covers it,
    and the probe finds it healthy.
Patch: the keys that the quantizer removes are added to the list first.
"""

from __future__ import annotations

import inspect
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="transformers-8bit-ignored-companions",
    module="transformers.quantizers.quantizer_bnb_8bit",
    claims={"transformers": ">=4.44.2,<4.57.1", "bitsandbytes": ""},
    patterns=(r"list\.remove\(x\): x not in list",),
    frames=("quantizer_bnb_8bit.py:create_quantized_param",),
    fixed_in="transformers 4.57.1",
    since="0.1.0",
    asked_once=True,
)

_NAME = "create_quantized_param"
_LISTED = "unexpected_keys"


def broken(quantizer_bnb_8bit: ModuleType) -> bool:
    """Look for the list: calling the quantizer would import bitsandbytes."""
    method = vars(resolve(quantizer_bnb_8bit, "Bnb8BitHfQuantizer")).get(_NAME)
    if method is None:
        return False
    return _LISTED in inspect.signature(method).parameters and "remove" in names_used(method)


def patch(quantizer_bnb_8bit: ModuleType, draft: Draft) -> None:
    def make(original):
        signature = inspect.signature(original)

        def create_quantized_param(*args, **kwargs):
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # upstream's own error
                return original(*args, **kwargs)
            listed = given.get(_LISTED)
            if listed is not None:
                for kind in ("SCB", "weight_format"):
                    key = given["param_name"].replace("weight", kind)
                    if key in given["state_dict"] and key not in listed:
                        listed.append(key)
            return original(*args, **kwargs)

        return create_quantized_param

    draft.wrap_plain(resolve(quantizer_bnb_8bit, "Bnb8BitHfQuantizer"), _NAME, make)
