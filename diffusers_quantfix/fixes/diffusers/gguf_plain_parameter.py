"""GGUF models with float32 weights fail under sequential offload.

Symptom: TypeError "new() received an invalid combination of arguments - got (Tensor, requires_grad=bool)" from
    ``enable_sequential_cpu_offload()`` and ``accelerate.cpu_offload``, with Wan for instance; ``copy.deepcopy`` turns
    these weights into tensors.
Cause: ``GGUFQuantizer.create_quantized_param`` dequantizes the weights of modules that stay in float32 or are not
    converted, and puts plain tensors among a module's parameters. accelerate rebuilds them by type.
Upstream: not reported.
Patch: the tensor becomes a parameter.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...weights.places import parameters_at

FIX = Fix(
    __doc__,
    id="diffusers-gguf-plain-parameter",
    module="diffusers.quantizers.gguf.gguf_quantizer",
    claims={"diffusers": ">=0.39.0,<=0.42.1", "gguf": ""},
    since="0.1.0",
    patterns=(r"new\(\) received an invalid combination of arguments - got \(Tensor, requires_grad=bool\)",),
    frames=(
        "accelerate/utils/modeling.py:set_module_tensor_to_device",
        "GGUF",
        "enable_sequential_cpu_offload",
    ),
)


def broken(gguf_quantizer: ModuleType) -> bool:
    """Let it replace a parameter with a tensor, as for a dequantized weight: is the result not a parameter?"""
    import torch

    create = resolve(gguf_quantizer, "GGUFQuantizer.create_quantized_param")
    names = names_used(create)
    if "dequantize_gguf_tensor" not in names or "Parameter" in names:  # nothing is dequantized before 0.39
        return False

    class Quantizer(resolve(gguf_quantizer, "GGUFQuantizer")):  # type: ignore[misc]
        modules_to_not_convert = ()

        def __init__(self) -> None:
            pass

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)
    Quantizer().create_quantized_param(model, torch.empty(1, device="meta"), "weight", "meta")
    return not isinstance(model._parameters["weight"], torch.nn.Parameter)


def patch(gguf_quantizer: ModuleType, draft: Draft) -> None:
    def make(original: Any) -> Any:
        def create_quantized_param(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            _make_parameter(*args, **kwargs)
            return result

        return create_quantized_param

    # Runs once for each tensor of a checkpoint.
    draft.wrap_plain(resolve(gguf_quantizer, "GGUFQuantizer"), "create_quantized_param", make)


def _make_parameter(model: Any, param_value: Any, param_name: str, *args: Any, **kwargs: Any) -> None:
    import torch

    parameters, name = parameters_at(model, param_name)
    tensor = parameters.get(name)
    if tensor is not None and not isinstance(tensor, torch.nn.Parameter):
        parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
