"""quanto int4 weights give wrong output if the input is not contiguous.

Symptom: with ``qint4`` weights in float16 on an NVIDIA GPU of compute capability 8.0 and above, a layer that gets part
    of a batch of sequences, ``hidden_states[:, 77:]``, or a transposed tensor computes with the wrong numbers, without
    an error: wrong images in batches of more than one. ``torch.nn.Linear`` accepts any input.
Cause: the AWQ kernels read the input from its address on, row after row, ignoring its strides; neither they nor
    ``AWQWeightQBitsLinearFunction`` check them.
Upstream: for the functions that raise an error there, https://github.com/huggingface/optimum-quanto/issues/327 (open).
Patch: the function gets a contiguous copy if the input is not contiguous.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.strided_input import asks_no_layout, contiguous

FIX = Fix(
    __doc__,
    id="quanto-awq-strided-input",
    module="optimum.quanto.tensor.weights.awq.qbits",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    harm="wrong result",
    frames=("awq", "qint4|int4", "contiguous|stride|batch"),
    hot=True,
    since="0.1.0",
    asked_once=True,
)

_FUNCTION = "AWQWeightQBitsLinearFunction"


def broken(qbits: ModuleType) -> bool:
    return asks_no_layout(resolve(qbits, f"{_FUNCTION}.forward"))


def patch(qbits: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(resolve(qbits, _FUNCTION), "forward", contiguous)
