"""A quanto model cannot be moved while a graph for the backward pass is alive.

Symptom: RuntimeError "_apply(): Couldn't swap QLinear.weight", from ``.to()``, ``.cpu()`` or model offload after a
    forward pass with gradients whose outputs, a loss for instance, are still alive; the layers before the first failing
    one have already moved. An unquantized model moves. ``StableDiffusionAttendAndExcitePipeline`` fails this way with
    ``enable_model_cpu_offload()``.
Cause: ``QuantizedLinearFunction`` saves the parameter itself for the backward pass. ``nn.Module._apply`` moves tensors
    of such classes with ``torch.utils.swap_tensors``, which refuses a tensor with other references.
Upstream: not reported.
Patch: such a layer first gets a new parameter around the same inner tensors, which is moved. The graph keeps the old
    one where it is, as it keeps the memory of a plain weight, and its gradient, if any, is passed on. (Optimizers,
    which hold the old one, do not change quanto weights.)
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.wrappers import is_wrapper

FIX = Fix(
    __doc__,
    id="quanto-move-beside-graph",
    module="optimum.quanto.nn.qlinear",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(r"_apply\(\): Couldn't swap QLinear\.weight",),
    frames=("torch/nn/modules/module.py:_apply", "torch/utils/__init__.py:swap_tensors"),
    hot=True,
    since="0.1.0",
)

_SUCCESSOR = "_quantfix_successor"


def broken(qlinear: ModuleType) -> bool:
    """Convert a layer whose weight of two numbers is kept by a graph."""
    import torch
    from optimum.quanto.tensor.qtype import qint8
    from optimum.quanto.tensor.weights import WeightQBytesTensor

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Any, weight: Any) -> Any:
            ctx.save_for_backward(weight)
            return given.clone()

    layer_class = resolve(qlinear, "QLinear")
    layer = layer_class.__new__(layer_class)  # without __init__, which quantizes
    torch.nn.Module.__init__(layer)
    data = torch.zeros(2, 1, dtype=torch.int8)
    weight = WeightQBytesTensor(qint8, 0, data.size(), data.stride(), data, torch.ones(2, 1), None)
    layer._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=False)
    with torch.inference_mode(False), torch.enable_grad():
        graph = Keep.apply(torch.zeros(1, requires_grad=True), layer._parameters["weight"])
    try:
        layer._apply(torch.Tensor.detach)
    except RuntimeError as error:
        return "swap" in str(error)
    del graph
    return False


def patch(qlinear: ModuleType, draft: Draft) -> None:
    def make(original):
        def _apply(self, fn, recurse=True):
            weight = self._parameters.get("weight")
            # One reference is the layer's.
            if is_wrapper(weight) and weight._use_count() > 1:
                self._parameters["weight"] = _successor(weight)
            return original(self, fn, recurse)

        return _apply

    draft.wrap_plain(resolve(qlinear, "QLinear"), "_apply", make)


def _successor(weight: Any) -> Any:
    """A new parameter around the inner tensors of ``weight``: the same one for all layers that share it."""
    import torch

    known = vars(weight).get(_SUCCESSOR)
    if known is None:
        known = torch.nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
        for name, value in vars(weight).items():
            vars(known).setdefault(name, value)
        if weight.requires_grad:
            known.grad, weight.grad = weight.grad, None
            weight.register_post_accumulate_grad_hook(_pass_on)
        vars(weight)[_SUCCESSOR] = known
    return known


def _pass_on(weight: Any) -> None:
    """Pass the gradient of ``weight`` to the parameter that replaced it."""
    known = vars(weight)[_SUCCESSOR]
    gradient, weight.grad = weight.grad.to(known.device), None
    known.grad = gradient if known.grad is None else known.grad + gradient
