"""quanto's backward pass fails on a weight that group offloading has offloaded.

Symptom: training a LoRA on an optimum-quanto model under block-level ``enable_group_offload`` and gradient
    checkpointing raises RuntimeError "Expected all tensors to be on the same device, but found at least two devices,
    cuda:0 and cpu! (when checking argument for argument mat2 in method wrapper_CUDA_mm)". An unquantized model trains.
Cause: ``QuantizedLinearFunction`` saves the parameter itself for the backward pass. Outside the blocks that are
    recomputed, its inner tensors are on the CPU by then. ``torch.nn.Linear`` saves a view, which keeps the memory on
    the device.
Upstream: not reported.
Patch: ``backward`` gets a copy of the weight on the gradient's device, if that differs.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...weights.quanto_backward import BackwardContext
from ...weights.wrappers import inner_places, is_wrapper

FIX = Fix(
    __doc__,
    id="quanto-offloaded-backward",
    module="optimum.quanto.tensor.function",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(r"quanto/tensor/function.{0,4000}Expected all tensors to be on the same device",),
    frames=(
        "quanto/tensor/function.py:backward",
        "torch/autograd/graph.py:_engine_run_backward",
        "quanto/tensor/qtensor.py:qfallback",
    ),
    hot=True,
    since="0.1.0",
    asked_once=True,
)


def broken(function: ModuleType) -> bool:
    """Does the backward pass never check where the weight is?"""
    backward = resolve(function, "QuantizedLinearFunction.backward")
    return "device" not in names_used(backward)


def patch(function: ModuleType, draft: Draft) -> None:
    def make(original):
        def backward(ctx, gO):
            # Read once: torch's checkpoint returns them only once.
            taken, weight = ctx.saved_tensors
            if is_wrapper(weight):
                holder, name = inner_places(weight)[0]
                here = getattr(holder, name).device
                # On meta there is nothing to copy; the original raises its error.
                if here != gO.device and here.type != "meta":
                    weight = weight.to(gO.device)
            return original(BackwardContext(taken, weight, ctx.needs_input_grad), gO)

        return backward

    draft.wrap_plain(resolve(function, "QuantizedLinearFunction"), "backward", make)
