"""A quantized model is always loaded onto the current CUDA device, not the requested one.

Symptom: ``from_pretrained(..., quantization_config=..., device_map={"": "cuda:1"})`` raises NotImplementedError
    "Currently, providing `device_map` is not supported for quantized models" ("is automatically inferred" in 0.31.0 and
    0.32.0); without a device_map the model is loaded onto ``torch.cuda.current_device()``, which raises without CUDA.
Cause: ``ModelMixin.from_pretrained`` rejects the request and sets ``param_device = torch.cuda.current_device()``
    (0.31.0: a bare int) for every quantized model.
Upstream: https://github.com/huggingface/diffusers/issues/10798; 0.33.0 takes the device map from the quantizer and
    dispatches the model.
Patch: the model is loaded onto the requested device; without a request it is loaded onto the current device of the
    available accelerator, with its index. For a request that cannot be met (a device that does not exist, a plan over
    several devices) a clear error is raised before anything is allocated. `diffusers_quantfix.loading.device` decides.

The function is 500 lines long, and both places are in its middle. A wrapper cannot know whether the checkpoint is
quantized (the function itself fetches that config), and cannot prevent the ``torch.cuda`` call on a machine without
CUDA. So only those two places are replaced in the function's own source.
"""

from __future__ import annotations

from types import CodeType, FunctionType, ModuleType

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...engine.source import own_function, recompiled, statements

FIX = Fix(
    __doc__,
    id="diffusers-param-device",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.31.0,<0.33", "accelerate": ""},
    patterns=(
        "Currently, .{0,40}device_map.{0,60} is (not )?supported",
        "Currently, providing is not supported for quantized models",
        "Currently, (device_map )?is automatically inferred for quantized",
    ),
    frames=("diffusers/models/modeling_utils.py:from_pretrained",),
    fixed_in="diffusers 0.33.0",
)


def broken(modeling_utils: ModuleType) -> bool:
    """Whether ``from_pretrained`` itself gets the device from CUDA (since 0.33.0 the quantizer does)."""
    return "current_device" in names_used(resolve(modeling_utils, "ModelMixin.from_pretrained"))


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    """Replace the code of ``ModelMixin.from_pretrained``."""
    function = own_function(modeling_utils, "ModelMixin.from_pretrained")
    draft.replace(function, "__code__", _with_chosen_device(function))


def _with_chosen_device(function: FunctionType) -> CodeType:
    """The code of ``from_pretrained`` with the rejection of a device_map and the CUDA call replaced.

    Raises:
        TargetMissing: one of the two places does not occur exactly once.
        OSError: the diffusers source is missing (installed as bytecode only).
    """
    import ast

    class Exchange(ast.NodeTransformer):
        def __init__(self):
            self.refusals = self.questions = 0

        def visit_If(self, node):
            self.generic_visit(node)
            refusal = node.body[0]
            if not (isinstance(refusal, ast.Raise) and "device_map" in names(node.test) and not node.orelse):
                return node
            if "quantized" not in texts(refusal):
                return node
            self.refusals += 1
            return statements(_REQUEST, node)

        def visit_Call(self, node):
            self.generic_visit(node)
            if ast.unparse(node) != "torch.cuda.current_device()":
                return node
            self.questions += 1
            return ast.copy_location(ast.Name("_quantfix_device", ast.Load()), node)

    def names(node):
        return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}

    def texts(node):
        return " ".join(str(child.value) for child in ast.walk(node) if isinstance(child, ast.Constant))

    exchange = Exchange()
    code = recompiled(function, exchange)
    if (exchange.refusals, exchange.questions) != (1, 1):
        raise TargetMissing("ModelMixin.from_pretrained chooses the device of a quantized model differently")
    return code


# By then upstream's own checks have converted device_map to a dictionary or a plan, or have rejected it.
_REQUEST = """
from diffusers_quantfix.loading.device import chosen_device as _quantfix_chosen_device
_quantfix_device = _quantfix_chosen_device(
    device_map, hf_quantizer.quantization_config, hf_quantizer.pre_quantized
)
device_map = None
"""
