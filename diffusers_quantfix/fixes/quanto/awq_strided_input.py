"""int4 weights of quanto give a wrong output where the input is not contiguous.

Symptom: with ``qint4`` weights in float16 on an NVIDIA GPU of compute capability 8.0 and above, a layer that gets a
    part of a batch of sequences, ``hidden_states[:, 77:]``, or a transposed tensor computes with other numbers, without
    an error: wrong images where a batch has more than one. ``torch.nn.Linear`` takes everything.
Cause: the AWQ kernels read the input from its address on, row after row, and know nothing of its strides; neither they
    nor ``AWQWeightQBitsLinearFunction`` ask.
Upstream: for the functions that raise an error there, https://github.com/huggingface/optimum-quanto/issues/327 (open).
Patch: the function gets a contiguous copy, where the input is not contiguous.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve, written_in

FIX = Fix(
    __doc__,
    id="quanto-awq-strided-input",
    module="optimum.quanto.tensor.weights.awq.qbits",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    harm="wrong result",
    frames=("awq", "qint4|int4", "contiguous|stride|batch"),
    hot=True,
    since="0.1.0",
)


def broken(qbits: ModuleType) -> bool:
    """Does the function never ask how the input lies in memory? The kernel itself needs a GPU and a compiler."""
    forward = resolve(qbits, "AWQWeightQBitsLinearFunction.forward")
    asked = {"contiguous", "is_contiguous", "stride", "reshape"}
    return not written_in(getattr(forward, "__func__", forward), __name__) and not asked & names_used(forward)


def patch(qbits: ModuleType, draft: Draft) -> None:
    def make(original):
        def forward(ctx, input, other, bias=None):
            if input.is_contiguous():
                return original(ctx, input, other, bias)
            output = original(ctx, input.contiguous(), other, bias)
            ctx.save_for_backward(input, other)
            return output

        return forward

    draft.wrap_plain(resolve(qbits, "AWQWeightQBitsLinearFunction"), "forward", make)
