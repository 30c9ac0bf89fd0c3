"""A pipeline with an 8-bit model is wrongly detected as sequentially offloaded.

Symptom: ``pipe.to("cpu")`` of a float16 pipeline with a bitsandbytes component does not print the warning "Pipelines
    loaded with `dtype=torch.float16` cannot run with `cpu` device".
Cause: inside ``DiffusionPipeline.to`` the function ``module_is_sequentially_offloaded`` treats every root hook of class
    ``AlignDevicesHook`` as offload. ``accelerate.dispatch_model`` puts one with ``offload=False`` on a model that is
    spread over several GPUs, and on an 8-bit model on one GPU too (accelerate before 1.2: also on a 4-bit one). It is
    called for transformers text encoders in every release, and for diffusers models since 0.33.0.
Upstream: https://github.com/huggingface/diffusers/issues/11352, https://github.com/huggingface/diffusers/pull/11356
    (0.34.0), which treats every 8-bit model as never offloaded.
Patch: a bitsandbytes module, and one whose hooks follow it (`models.following`), counts as offloaded if and only if one
    of its hooks really offloads; for all other modules upstream's own rule remains. Its error keeps ``.to("cuda")``
    from partially moving a model that is spread over GPUs.

The function is local to ``to``, so it cannot be wrapped. Removing the hooks from the modules while ``to`` runs would
affect other threads, and an exception could leave them removed. So the patch replaces, in the constants of ``to``, the
code object from which ``to`` creates the function on each call: one assignment, which does not affect a running call.
"""

from __future__ import annotations

from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import function_of, nested_code, resolve

FIX = Fix(
    __doc__,
    id="diffusers-8bit-offload-detection",
    module="diffusers.pipelines.pipeline_utils",
    claims={"diffusers": ">=0.31.0,<0.34", "accelerate": ""},
    patterns=(
        "cannot run with cpu device",
        "you have activated sequential model offloading by calling",
    ),
    frames=("diffusers/pipelines/pipeline_utils.py:to", "8.?bit|int8"),
    fixed_in="diffusers 0.34.0",
)

_NAME = "module_is_sequentially_offloaded"


def broken(pipeline_utils: ModuleType) -> bool:
    """Call the nested function with an 8-bit model that has a hook that only aligns inputs."""
    code = nested_code(function_of(resolve(pipeline_utils, "DiffusionPipeline.to")).__code__, _NAME)
    if code.co_freevars:
        raise TargetMissing(
            f"{_NAME} is another function here: it uses {', '.join(code.co_freevars)} of its caller"
        )
    if not FunctionType(code, vars(pipeline_utils))(_dispatched_8bit_model()):
        return False
    # Since 0.34.0 upstream checks the quantization itself. From 0.37.0 on it relies on the hook again if accelerate no
    # longer puts one on an 8-bit model: the remaining cases are rarer, and a different bug.
    return "_check_bnb_status" not in code.co_names


def patch(pipeline_utils: ModuleType, draft: Draft) -> None:
    """Replace the nested code object in ``DiffusionPipeline.to``."""
    to = function_of(resolve(pipeline_utils, "DiffusionPipeline.to"))
    upstream = nested_code(to.__code__, _NAME)
    ours = module_is_sequentially_offloaded.__code__
    ours = _exchanged(ours, nested_code(ours, "upstream_rule"), upstream)
    draft.replace(to, "__code__", _exchanged(to.__code__, upstream, ours))


def module_is_sequentially_offloaded(module: Any) -> bool:
    """What ``DiffusionPipeline.to`` calls for each of its components, which may be any object.

    Only this function's code is used, with diffusers' globals, so it imports everything it needs.
    """

    def upstream_rule(module):
        """Its code is replaced by upstream's."""

    from diffusers.pipelines.pipeline_utils import _check_bnb_status

    from diffusers_quantfix.engine.versions import is_installed
    from diffusers_quantfix.models.following import follows
    from diffusers_quantfix.offloading.hooks import is_sequentially_offloaded, is_spread

    # A component on several devices cannot be moved to a GPU either. Before 0.32.0 upstream refuses it, which is kept;
    # from 0.32.0 on `diffusers-spread-guard` does.
    alone = is_spread(module) and is_installed("diffusers", "<0.32")
    if (any(_check_bnb_status(module)) or follows(module)) and not alone:
        return is_sequentially_offloaded(module)
    return bool(upstream_rule(module))


def _exchanged(code: CodeType, old: CodeType, new: CodeType) -> CodeType:
    """``code`` with the nested code object ``old`` replaced by ``new``."""
    return code.replace(co_consts=tuple(new if const is old else const for const in code.co_consts))


def _dispatched_8bit_model() -> SimpleNamespace:
    """A stand-in for a model that bitsandbytes quantized and accelerate dispatched to one device."""
    from accelerate.hooks import AlignDevicesHook
    from diffusers.quantizers.quantization_config import QuantizationMethod

    return SimpleNamespace(
        _hf_hook=AlignDevicesHook(execution_device="cpu", io_same_device=True),
        is_quantized=True,
        is_loaded_in_8bit=True,
        quantization_method=QuantizationMethod.BITS_AND_BYTES,
    )
