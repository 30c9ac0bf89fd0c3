"""A saved 4-bit layer with "bias" in its name cannot be loaded.

Symptom: ValueError "Expected the flattened shape of the current param (pair_bias.weight) to be torch.Size([32, 1]) but
    is (64,)" from ``from_pretrained`` of a saved 4-bit model with a layer whose name contains "bias", such as
    RFD4 Proteina's ``to_bias``.
Cause: the shape check of diffusers' 4-bit quantizer takes a parameter for a bias if its name contains "bias" anywhere,
    the names of the layers it belongs to included.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/quantizers/bitsandbytes/bnb_quantizer.py#L207;
    not reported.
Patch: the check is given the last part of the name.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-4bit-bias-name",
    module="diffusers.quantizers.bitsandbytes.bnb_quantizer",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "bitsandbytes": ""},
    patterns=(r"Expected the flattened shape of the current param \(\S*bias\S*\.weight\)",),
    frames=("4.?bit", "bnb_quantizer.py:check_quantized_param_shape"),
    since="0.1.0",
)

_QUANTIZER = "BnB4BitDiffusersQuantizer"


class _Shape(tuple[int, ...]):
    """A tensor with a shape, and a shape with a count of elements, which 0.31 wants, for the probe."""

    __slots__ = ()

    @property
    def shape(self) -> _Shape:
        return self

    def numel(self) -> int:
        count = 1
        for size in self:
            count *= size
        return count


def broken(bnb_quantizer: ModuleType) -> bool:
    """Check the packed weight of a layer named ``to_bias``: is it taken for a bias?"""
    quantizer = resolve(bnb_quantizer, _QUANTIZER)
    check = quantizer.__new__(quantizer).check_quantized_param_shape
    whole, packed = _Shape((2, 2)), _Shape((2, 1))
    check("layer.weight", whole, packed)
    try:
        check("to_bias.weight", whole, packed)
    except ValueError:
        return True
    return False


def patch(bnb_quantizer: ModuleType, draft: Draft) -> None:
    def make(original):
        def check_quantized_param_shape(self, param_name, *args, **kwargs):
            last = param_name.rpartition(".")[2]
            try:
                return original(self, last, *args, **kwargs)
            except ValueError as error:
                raise ValueError(str(error).replace(f"({last})", f"({param_name})")) from None

        return check_quantized_param_shape

    draft.wrap_plain(resolve(bnb_quantizer, _QUANTIZER), "check_quantized_param_shape", make)
