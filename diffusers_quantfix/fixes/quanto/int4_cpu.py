"""quanto int4 weights in bfloat16 cannot be on the CPU.

Symptom: NotImplementedError "Could not run 'aten::_convert_weight_to_int4pack' with arguments from the 'CPU' backend"
    when a bfloat16 model is quantized to ``qint4``, loaded or moved to the CPU.
Cause: ``WeightQBitsTensor.create`` repacks such weights for torch's tinygemm kernel, whose CPU function has had another
    name since torch 2.6.
Upstream: https://github.com/huggingface/optimum-quanto/releases/tag/v0.2.7; changed in optimum-quanto 0.2.7.
Patch: on the CPU ``create`` returns the plain class, which dequantizes and multiplies, as for every other type.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="quanto-int4-cpu",
    module="optimum.quanto.tensor.weights.qbits",
    claims={"optimum-quanto": ">=0.2.5,<0.2.7", "torch": ">=2.6"},
    patterns=("Could not run 'aten::_convert_weight_to_int4pack' with arguments from the 'CPU' backend",),
    frames=("optimum/quanto/",),
    fixed_in="optimum-quanto 0.2.7",
    hot=True,
)


def broken(qbits: ModuleType) -> bool:
    """Make a small int4 weight on the CPU."""
    import torch

    data = torch.zeros(64, 128, dtype=torch.uint8)
    scale = torch.ones(64, 1, dtype=torch.bfloat16)
    create = resolve(qbits, "WeightQBitsTensor").create
    try:
        create(resolve(qbits, "qint4"), 0, 128, data.size(), data.stride(), data, scale, scale)
    except NotImplementedError:
        return True
    return False


def patch(qbits: ModuleType, draft: Draft) -> None:
    plain_class = resolve(qbits, "WeightQBitsTensor")

    def make(original):
        def create(qtype, axis, group_size, size, stride, data, scale, shift, requires_grad=False):
            if data.device.type == "cpu":
                return plain_class(qtype, axis, group_size, size, stride, data, scale, shift, requires_grad)
            return original(qtype, axis, group_size, size, stride, data, scale, shift, requires_grad)

        return create

    draft.wrap_plain(plain_class, "create", make)
