"""A 4-bit layer gives one row without a batch a wrong shape, and memory that nobody has written to.

Symptom: RuntimeError "The size of tensor a (64) must match the size of tensor b (128) at non-singleton dimension 2"
    from ``AdaLayerNorm`` of VQ Diffusion in 4 bits; a 4-bit layer gives an output of shape [features, outputs] for an
    input of shape [features], whose values are what was in the GPU's memory before, but for the first row.
Cause: ``gemv_4bit``, which multiplies a single row, makes its output for inputs of two and three dimensions:
    ``torch.empty(size=(A.shape[0], bout))``. For one of four, [1, 1, 1, features], the output has two.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/980; 0.46.0 computes the right shape.
Patch: for such inputs it is called with an output of the right shape.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="bnb-gemv-shape",
    module="bitsandbytes.functional",
    claims={"bitsandbytes": ">=0.43.0,<0.46.0"},
    harm="wrong result",
    patterns=(
        r"normalization\.py.{0,400}x = self\.norm\(x\) \* \(1 \+ scale\) \+ shift.{0,400}"
        r"The size of tensor a \(\d+\) must match the size of tensor b",
    ),
    frames=("4.?bit", "gemv_4bit", "VQDiffusion", "diffusers/models/normalization.py:forward"),
    fixed_in="bitsandbytes 0.46.0",
    hot=True,
    asked_once=True,
    since="0.1.0",
)


def broken(functional: ModuleType) -> bool:
    """Does it make its output itself? A call would need a GPU."""
    return "empty" in names_used(resolve(functional, "gemv_4bit"))


def patch(functional: ModuleType, draft: Draft) -> None:
    def make(original):
        def gemv_4bit(A, B, out=None, transposed_A=False, transposed_B=False, state=None):
            if out is None and state is not None and A.dim() not in (2, 3):
                out = A.new_empty((*A.shape[:-1], state.shape[0]))
            return original(A, B, out, transposed_A, transposed_B, state)

        return gemv_4bit

    draft.wrap_plain(functional, "gemv_4bit", make)
