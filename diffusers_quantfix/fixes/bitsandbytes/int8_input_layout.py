"""8-bit layers misread part of a batch, and fail on four-dimensional input.

Symptom: RuntimeError "The size of tensor a (4) must match the size of tensor b (64) at non-singleton dimension 2" from
    the CPU kernels, or UnboundLocalError "cannot access local variable 'rows'" before 0.45, with Allegro and anything
    else that gives a ``Linear8bitLt`` a four-dimensional input. The CUDA kernels look for outliers in the wrong
    dimension. IndexError "Dimension out of range" for a one-dimensional input, as in VQ Diffusion. A float16 input on
    CUDA whose rows are not contiguous in memory, ``hidden_states[:, 0]`` of a batch of two, is read as if they were:
    the second row of the output is wrong, without an error.
Cause: ``MatMul8bitLt.forward`` flattens only three-dimensional inputs, and the code after that assumes a matrix; the
    kernel ``cint8_vector_quant`` gets its address, but no strides.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/980,
    https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2062.
Patch: ``matmul`` makes its input contiguous if it is not, treats a vector as a matrix of one row, flattens an input of
    more than three dimensions, and restores the shape of the output; all in its own code, since a wrapper would add a
    call to every run. It checks first: torch.compile counts ``contiguous`` as an operation, and would add a graph
    break.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import own_function, recompiled, statements

FIX = Fix(
    __doc__,
    id="bnb-int8-input-layout",
    module="bitsandbytes.autograd._functions",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    harm="wrong result",
    since="0.1.0",
    patterns=(
        r"size of tensor a .{0,200}Linear8bitLt",
        r"bitsandbytes/autograd/_functions.{0,2000}size of tensor a \(\d+\) must match the size of tensor b",
        "local variable 'rows' (where it is not associated with a value|referenced before assignment)",
    ),
    frames=("bitsandbytes/autograd/_functions.py:forward", "Linear8bitLt", "MatMul8bitLt"),
    hot=True,
)


class _Flattened(Exception):
    """The input was reshaped."""


class _Used(Exception):
    """The input was used in its original shape."""


class _Input:
    """The probe's stand-in for a four-dimensional input."""

    shape = (1, 1, 1, 1)
    requires_grad = False

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def reshape(self, *_: Any) -> Any:
        raise _Flattened

    view = flatten = reshape

    def is_contiguous(self) -> bool:
        return True

    def contiguous(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        raise _Used(name)


def broken(functions: ModuleType) -> bool:
    """Does `matmul` use a four-dimensional input before it flattens it?"""
    import torch

    matmul, state = resolve(functions, "matmul"), resolve(functions, "MatmulLtState")()
    state.is_training = False
    try:
        matmul(_Input(torch.float16), torch.empty(1, 1), state=state)
    except _Used:
        return True
    except _Flattened:
        return False
    return False


def patch(functions: ModuleType, draft: Draft) -> None:
    """Prepend the special cases to the code of ``matmul``."""
    import ast

    class Exchange(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            given = [one.arg for one in node.args.args]
            if given[:2] != ["A", "B"] or node.args.vararg or node.args.kwarg or node.args.kwonlyargs:
                raise TargetMissing("matmul has different arguments")
            before = f"""
if not A.is_contiguous():
    A = A.contiguous()
if len(A.shape) == 1:
    return matmul(A[None], {", ".join(given[1:])})[0]
if len(A.shape) > 3:
    return matmul(A.flatten(0, -2), {", ".join(given[1:])}).unflatten(0, A.shape[:-1])
"""
            node.body[:0] = statements(before, node.body[0])
            return node

    function = own_function(functions, "matmul")
    draft.replace(function, "__code__", recompiled(function, Exchange()))
