"""An OFT merged into bitsandbytes weights transposes them, and has no effect.

Symptom: after ``merge_adapter()`` or ``merge_and_unload()`` of an OFT the output of a 4-bit or 8-bit model is wrong,
    off by more than its own size, without an error; for layers that are not square it is RuntimeError "mat1 and mat2
    shapes cannot be multiplied" or another error. ``unmerge_adapter()`` of 4-bit weights transposes them again, and
    does not remove the OFT.
Cause: ``merge``, and ``unmerge`` of ``Linear4bit``, compute the product ``w_data`` of the rotation and the weight, and
    then overwrite it: ``w_data = output.to(...)``, where ``output`` is the transposed weight.
Upstream: https://github.com/huggingface/peft/blob/v0.18.1/src/peft/tuners/oft/bnb.py; not reported; peft 0.21.0
    replaced the classes. In 0.20.0 an OFT cannot be added to bitsandbytes layers: TypeError, missing 1 required
    positional argument: 'config'.
Patch: that statement converts the product, in the methods' own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.source import exchanged, own_function

FIX = Fix(
    __doc__,
    id="peft-merge-oft-bnb",
    module="peft.tuners.oft.bnb",
    claims={"peft": ">=0.16.0,<0.21.0", "bitsandbytes": ""},
    harm="wrong result",
    frames=("merge_adapter|merge_and_unload|merge", r"\bOFT\b|tuners/oft/bnb\.py"),
    fixed_in="peft 0.21.0",
    asked_once=True,
)

_DISCARDS = "w_data = output.to(oft_data.dtype).to(oft_data.device)"
_CONVERTS = "w_data = w_data.to(oft_data.dtype).to(oft_data.device)"


def broken(bnb: ModuleType) -> bool:
    """Does the source of a method overwrite its product?"""
    return any(True for _ in _corrected(bnb))


def patch(bnb: ModuleType, draft: Draft) -> None:
    corrected = list(_corrected(bnb))
    if not corrected:
        raise TargetMissing(f"{bnb.__name__} merges differently")
    for function, code in corrected:
        draft.replace(function, "__code__", code)


def _corrected(bnb: ModuleType) -> Iterator[tuple[FunctionType, CodeType]]:
    """The methods whose source overwrites the product, each with corrected code.

    Which of the classes peft defines depends on bitsandbytes. ``unmerge`` of ``Linear8bitLt`` is correct.
    """
    for name in ("Linear8bitLt", "Linear4bit"):
        for method in ("merge", "unmerge") if hasattr(bnb, name) else ():
            function = own_function(bnb, f"{name}.{method}")
            try:
                yield function, exchanged(function, _DISCARDS, _CONVERTS)
            except TargetMissing:
                continue
