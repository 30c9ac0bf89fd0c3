"""A damaged checkpoint of quanto's weights is loaded without an error.

Symptom: after ``requantize`` or ``QuantizedDiffusersModel.from_pretrained`` of a checkpoint whose ``weight._scale`` has
    another shape, the output is wrong; where it is missing, the weight is memory that nothing was written to. Nothing
    is said.
Cause: ``QModuleMixin._load_from_state_dict`` assigns the inner tensors as they are, and passes over a weight of which
    one is missing; ``requantize`` loads with ``strict=False`` and does not look at what is missing.
Upstream: not reported.
Patch: a shape that does not fit is an error of ``load_state_dict``, as it is for the parameters of torch, with its
    words. So is a part of a weight without the others where the layer has only a plain weight to lose.
"""

from __future__ import annotations

from ...engine.fix import Fix
from ...engine.probe import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

FIX = Fix(
    id="quanto-checkpoint-shape",
    title="a damaged checkpoint of quanto's weights is loaded without an error",
    module="optimum.quanto.nn.qmodule",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    upstream=(),
    symptom="wrong output after requantize() or QuantizedDiffusersModel.from_pretrained of a checkpoint whose "
    "weight._scale is missing or has another shape",
    patterns=(r"size mismatch for \S*weight\._(scale|shift|data)",),
    since="0.1.0",
    harm="wrong result",
    frames=("requantize|load_state_dict|from_pretrained", "quanto"),
)


def broken(qmodule: ModuleType) -> bool:
    """Let a layer of two numbers load a scale of the wrong shape."""
    import torch

    mixin, qint8 = resolve(qmodule, "QModuleMixin"), resolve(qmodule, "qtypes")["qint8"]

    class Tiny(mixin, torch.nn.Linear):  # type: ignore[misc, valid-type]
        pass

    layer = Tiny.__new__(Tiny)
    torch.nn.Module.__init__(layer)
    layer.weight_qtype, layer.activation_qtype, layer.bias = qint8, None, None
    layer.weight = torch.nn.Parameter(torch.zeros(2, 1), requires_grad=False)
    state = {"weight._data": torch.zeros(2, 1, dtype=torch.int8), "weight._scale": torch.ones(1, 2)}
    errors: list[str] = []
    layer._load_from_state_dict(state, "", {}, False, [], [], errors)
    return not errors


def patch(qmodule: ModuleType, draft: Draft) -> None:
    import inspect

    signature = inspect.signature(resolve(qmodule, "QModuleMixin._load_from_state_dict"))

    def make(original):
        def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
            errors = _errors(self, state_dict, f"{prefix}weight")
            if not errors:
                return original(self, state_dict, prefix, *args, **kwargs)
            given = signature.bind(self, state_dict, prefix, *args, **kwargs).arguments
            given["error_msgs"].extend(errors)
            # The weight stays as it is, as torch leaves a parameter; it is not missing.
            rest = {key: value for key, value in state_dict.items() if not key.startswith(f"{prefix}weight.")}
            missing = given["missing_keys"]
            known = len(missing)
            original(self, rest, prefix, *args, **kwargs)
            del missing[known:]
            return None

        return _load_from_state_dict

    draft.wrap_plain(resolve(qmodule, "QModuleMixin"), "_load_from_state_dict", make)


def _errors(layer: Any, state_dict: Any, name: str) -> list[str]:
    """What is wrong with the inner tensors of one weight, in the words of torch; empty where there are none.

    One number may have any shape, and is the scale of all rows: quanto saves the scale of a single row as a scalar, an
    optimizer of the user may give one for the whole weight, and so do weights in float8 that were not made by quanto.
    """
    import math

    if layer.weight_qtype is None or layer.weight is None:
        return []
    expected = _shapes(layer, name)
    found = {key: state_dict[key].shape for key in expected if key in state_dict}
    if not found:
        return []
    errors = [
        f"size mismatch for {key}: copying a param with shape {tuple(shape)} from checkpoint, the shape in current "
        f"model is {expected[key]}."
        for key, shape in found.items()
        if tuple(shape) != expected[key]
        and not (
            shape.numel() == 1 and (math.prod(expected[key]) == 1 or key.endswith(("._scale", "._shift")))
        )
    ]
    missing = [key for key in expected if key not in found]
    if missing and not hasattr(layer.weight, "save_to_state_dict"):  # not frozen: it has no other one to keep
        errors.append(f"{', '.join(missing)}: missing, while the checkpoint has {', '.join(found)}.")
    return errors


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
