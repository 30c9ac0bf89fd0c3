"""A damaged checkpoint of quanto weights is loaded without an error.

Symptom: after ``requantize`` or ``QuantizedDiffusersModel.from_pretrained`` of a checkpoint whose ``weight._scale`` has
    the wrong shape, the output is wrong; if it is missing, the weight is uninitialized memory. There is no error.
Cause: ``QModuleMixin._load_from_state_dict`` assigns the inner tensors as they are, and skips a weight with one
    missing; ``requantize`` loads with ``strict=False`` and ignores missing keys.
Upstream: not reported.
Patch: a shape that does not fit is an error of ``load_state_dict``, as for torch's parameters, with the same message.
    So is an incomplete weight if the layer only has a plain, unfrozen one. A scale with one number per row, in whatever
    shape, is used as the row scale; one for the last axis is left alone.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.unread import Used, unread

FIX = Fix(
    __doc__,
    id="quanto-checkpoint-shape",
    module="optimum.quanto.nn.qmodule",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(r"size mismatch for \S*weight\._(scale|shift|data)",),
    since="0.1.0",
    harm="wrong result",
    frames=("requantize|load_state_dict|from_pretrained", "quanto"),
)


def broken(qmodule: ModuleType) -> bool:
    """Let a layer of two numbers load a scale of the wrong shape; is it used without an error?

    Nothing more: to make a weight of it, quanto would import the kernels of all kinds of weights.
    """
    import torch

    mixin, qint8 = resolve(qmodule, "QModuleMixin"), resolve(qmodule, "qtypes")["qint8"]

    class Tiny(mixin, torch.nn.Linear):  # type: ignore[misc, valid-type]
        pass

    layer = Tiny.__new__(Tiny)
    torch.nn.Module.__init__(layer)
    layer.weight_qtype, layer.activation_qtype, layer.bias = qint8, None, None
    layer.weight = torch.nn.Parameter(torch.zeros(2, 1), requires_grad=False)
    state = {"weight._data": unread(torch.zeros(2, 1, dtype=torch.int8)), "weight._scale": torch.ones(3, 2)}
    errors: list[str] = []
    try:
        layer._load_from_state_dict(state, "", {}, False, [], [], errors)
    except Used:
        return True
    return not errors


def patch(qmodule: ModuleType, draft: Draft) -> None:
    import inspect

    signature = inspect.signature(resolve(qmodule, "QModuleMixin._load_from_state_dict"))

    def make(original):
        def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
            errors, reshaped = _compared(self, state_dict, f"{prefix}weight")
            if not errors:
                if reshaped:
                    state_dict = {**state_dict, **reshaped}
                return original(self, state_dict, prefix, *args, **kwargs)
            given = signature.bind(self, state_dict, prefix, *args, **kwargs).arguments
            given["error_msgs"].extend(errors)
            # The weight stays as it is, as torch leaves a parameter; it does not count as missing.
            rest = {key: value for key, value in state_dict.items() if not key.startswith(f"{prefix}weight.")}
            missing = given["missing_keys"]
            known = len(missing)
            original(self, rest, prefix, *args, **kwargs)
            del missing[known:]
            return None

        return _load_from_state_dict

    draft.wrap_plain(resolve(qmodule, "QModuleMixin"), "_load_from_state_dict", make)


def _compared(layer: Any, state_dict: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with the inner tensors of one weight, and which of them only need reshaping.

    A single number may have any shape, and is the scale of all rows: quanto saves the scale of a single row as a
    scalar, a user's optimizer may give one for the whole weight, and so do float8 weights not made by quanto.

    Returns:
        (errors in torch's words, name -> the tensor in the shape of the model's), both usually empty.
    """
    errors: list[str] = []
    reshaped: dict[str, Any] = {}
    if layer.weight_qtype is None or layer.weight is None:
        return errors, reshaped
    expected = _shapes(layer, name)
    found = {key: state_dict[key] for key in expected if key in state_dict}
    if not found:
        return errors, reshaped
    for key, tensor in found.items():
        shape, wanted = tuple(tensor.shape), expected[key]
        if shape == wanted:
            continue
        scale = key.endswith(("._scale", "._shift"))
        if tensor.numel() == 1 and (scale or math.prod(wanted) == 1):
            continue
        if scale and _along_the_last_axis(shape, wanted, tuple(layer.weight.size())):
            continue
        if scale and tensor.numel() == wanted[0]:
            reshaped[key] = tensor.reshape(wanted)
            continue
        errors.append(
            f"size mismatch for {key}: copying a param with shape {shape} from checkpoint, the shape in current "
            f"model is {wanted}."
        )
    missing = [key for key in expected if key not in found]
    if missing and not hasattr(layer.weight, "save_to_state_dict"):  # not frozen: no quantized one to keep
        errors.append(f"{', '.join(missing)}: missing, while the checkpoint has {', '.join(found)}.")
    return errors, reshaped


def _along_the_last_axis(shape: tuple[int, ...], wanted: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Is it the scale that ``quantize_weight(..., axis=-1)`` makes? quanto loads it, and computes with it.

    For a square weight a transposed row scale has the same shape: nothing distinguishes the two.
    """
    return wanted[0] == size[0] and shape == (*(1 for _ in size[1:]), size[-1])


def _shapes(layer: Any, name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the inner tensors of ``layer.weight`` by their names in a checkpoint.

    Upstream: ``WeightQBytesTensor``, ``WeightQBitsTensor``, ``PackedTensor`` and ``group`` of optimum-quanto 0.2.7.
    """
    size = tuple(layer.weight.size())
    bits = layer.weight_qtype.bits
    group = None if bits == 8 else layer.weight_group_size
    if group is not None:
        size = (layer.weight.numel() // group, group)
    scale = (size[0], *(1 for _ in size[1:]))
    if bits == 8:
        return {f"{name}._data": size, f"{name}._scale": scale}
    in_a_byte = 8 // bits
    packed = (-(-size[0] // in_a_byte), *size[1:])
    return {f"{name}._data._data": packed, f"{name}._scale": scale, f"{name}._shift": scale}
