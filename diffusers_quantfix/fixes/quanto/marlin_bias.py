"""The Marlin kernel of quanto's float8 weights loses the bias.

Symptom: a noise image from FLUX with float8 weights (``qfloat8``) on an NVIDIA GPU, without an error. The GPU is of
    compute capability 8.0 or above. With float32 activations an AssertionError or "expected scalar type" from the
    kernel.
Cause: ``MarlinF8QBytesLinearFunction.forward`` has a parameter ``bias`` and never uses it, and does not cast the input
    to the half precision that the kernel requires.
Upstream: https://github.com/huggingface/optimum-quanto/issues/332, PR 409 (unmerged);
    https://github.com/huggingface/diffusers/issues/11540.
Patch: the input is cast to the dtype of the scales, as in the plain path, and the bias is added. By default no weight
    gets here any more (``quanto-fp8-plain``): this is for Marlin by choice and for data packed earlier.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="quanto-marlin-bias",
    module="optimum.quanto.tensor.weights.marlin.fp8.qbits",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    harm="wrong result",
    frames=("marlin", "qfloat8|float8|fp8"),
    hot=True,
)


def broken(qbits: ModuleType) -> bool:
    """Does the code of ``forward`` ever read its parameter ``bias``?"""
    import dis

    forward = resolve(qbits, "MarlinF8QBytesLinearFunction.forward")
    code = getattr(forward, "__func__", forward).__code__
    # Since Python 3.13 one instruction may read two variables.
    read = [ins.argval for ins in dis.get_instructions(code) if ins.opname.startswith("LOAD_FAST")]
    return not any("bias" in (name if isinstance(name, tuple) else (name,)) for name in read)


def patch(qbits: ModuleType, draft: Draft) -> None:
    def make(original):
        def forward(ctx, input, other, bias=None):
            output = original(ctx, input.to(other._scale.dtype), other)
            return output if bias is None else output + bias

        return forward

    draft.wrap_plain(resolve(qbits, "MarlinF8QBytesLinearFunction"), "forward", make)
