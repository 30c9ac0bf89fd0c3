"""The memory that a model will take once it is quantized, computed from the model on ``meta``.

A plan over several devices is made from the model on ``meta``, before any weight is read. The quantizer knows which
parameters will be quantized, and to how many bits: diffusers and transformers ask it when they plan a single model.

torch and accelerate are imported inside the functions.
"""

from __future__ import annotations

from ..engine.classes import mro, package_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["shrink"]


def shrink(model: Any, config: Any) -> int:
    """Replace every weight of ``model`` that ``config`` will quantize by a meta tensor of its quantized size.

    Args:
        model: a model of diffusers or transformers, on ``meta``; afterwards it can only be used for measuring.
        config: the quantization config, or the dictionary in a saved model's configuration. It is not changed.

    Returns:
        The number of these weights.
    """
    import copy

    import torch

    quantizer = _quantizer(model, copy.deepcopy(config))
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    kept = _kept_in_float32(quantizer, model)
    quantizer.preprocess_model(model=model, device_map=None, keep_in_fp32_modules=kept)
    if _is_of_transformers(model) and dtype != torch.float16:
        kept = []
    is_quantized, element_size = _question(quantizer, model), _element_size(quantizer, model, dtype)
    smaller, others = {}, {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            count = parameter.numel()
            if name == "weight" and is_quantized(f"{path}.{name}", parameter):
                per_element = element_size(f"{path}.{name}", parameter)
                # Scales: one float32 per 64 4-bit weights, one per row in 8 bits. No method we know has more.
                scales = count / 16 if per_element < 1 else 4 * parameter.shape[0]
                smaller[module, name] = min(int(count * per_element + scales), count * dtype.itemsize)
            elif not set(kept).isdisjoint(path.split(".")) and parameter.is_floating_point():
                others[module, name] = count * 4
    for (module, name), size in {**smaller, **others}.items():
        packed = torch.empty(size, dtype=torch.uint8, device="meta")
        module._parameters[name] = torch.nn.Parameter(packed, requires_grad=False)
    return len(smaller)


def _quantizer(model: Any, config: Any) -> Any:
    # Not pre-quantized, because such a quantizer waits for the tensors of the checkpoint.
    if _is_of_transformers(model):
        from transformers.quantizers.auto import AutoHfQuantizer

        return AutoHfQuantizer.from_config(config, pre_quantized=False)
    from diffusers.quantizers import DiffusersAutoQuantizer

    return DiffusersAutoQuantizer.from_config(config, pre_quantized=False)


def _kept_in_float32(quantizer: Any, model: Any) -> list[str]:
    """The names of modules that are loaded in float32; in transformers only if the model is in float16."""
    if not _is_of_transformers(model) and not getattr(quantizer, "use_keep_in_fp32_modules", False):
        return []
    kept = getattr(model, "_keep_in_fp32_modules", None) or []
    return list(kept) if isinstance(kept, (list, tuple, set)) else [kept]


def _question(quantizer: Any, model: Any) -> Callable[[str, Any], bool]:
    """A function that tells whether a weight will be quantized, by asking this release's quantizer."""
    if hasattr(quantizer, "param_needs_quantization"):  # transformers since 4.57
        return lambda name, weight: quantizer.param_needs_quantization(model, name)
    name_of_old = "check_quantized_param" if _is_of_transformers(model) else "check_if_quantized_param"
    ask = getattr(quantizer, name_of_old)
    quantizer.offload = False  # torchao's is set while the environment is checked
    return lambda name, weight: ask(model, weight, name, {})


def _element_size(quantizer: Any, model: Any, dtype: Any) -> Callable[[str, Any], float]:
    """A function that returns the bytes per element of a quantized weight, by asking this release's quantizer."""
    if hasattr(quantizer, "param_element_size"):  # transformers since 5.0
        return lambda name, weight: float(quantizer.param_element_size(model, name, weight))
    from accelerate.utils import dtype_byte_size

    size = float(dtype_byte_size(quantizer.adjust_target_dtype(dtype)))
    return lambda name, weight: size


def _is_of_transformers(model: Any) -> bool:
    return any(package_name(cls) == "transformers" for cls in mro(type(model)))
