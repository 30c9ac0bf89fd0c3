"""Which 8-bit models can be moved, and moving them in spite of the checks in older releases.

bitsandbytes could not move 8-bit layers, so diffusers and transformers refuse to move a model that has them, in several
places each, depending on each other's version. If the layers move completely (``bnb-linear8bit-move``, or a
bitsandbytes that does so itself), there is no reason to refuse. The fixes for these checks share the test whether a
model can move, and the move.

accelerate before 1.13 adds hooks to every 8-bit model that move its inputs to the device where it was loaded. After a
move, inputs and weights would be on different devices, so the hooks are updated.

Neither torch nor another library is imported here at module level.

Upstream: diffusers/models/modeling_utils.py, diffusers/pipelines/pipeline_utils.py, transformers/modeling_utils.py,
accelerate/hooks.py (``AlignDevicesHook``), bitsandbytes/nn/modules.py (``Linear8bitLt``).
"""

from __future__ import annotations

import sys

from ..offloading.hooks import align_hooks, is_group_offloaded, is_sequentially_offloaded, is_spread
from ..weights.companions import companions
from ..weights.method import method_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["align", "asked_device", "can_move", "is_8bit", "move", "passes"]


def is_8bit(model: Any) -> bool:
    """Whether ``model`` was loaded in 8 bits by bitsandbytes, through diffusers or transformers."""
    if not getattr(model, "is_loaded_in_8bit", False) or not hasattr(model, "parameters"):
        return False
    return method_of(model) == "bitsandbytes"


def can_move(model: Any) -> bool:
    """Whether ``.to()`` moves the whole ``model``, quantized or not, and nothing else controls its device.

    False for a model that is spread over devices, that hooks of accelerate or diffusers offload, or whose layers would
    not move their matrices.
    """
    if is_spread(model):
        return False
    plain = sys.modules["torch"].nn.Module._apply
    for module in model.modules():
        weight = module._parameters.get("weight")
        if type(weight).__name__ == "Int8Params" and type(module)._apply is plain:
            return False
    if any(parameter.is_meta for parameter in model.parameters()):
        return False
    return not is_sequentially_offloaded(model) and not is_group_offloaded(model)


def passes(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``model.to(*args, **kwargs)`` of an 8-bit model may skip upstream's checks and be done by `move`.

    Upstream handles any other model, a cast, and a move of a model that cannot move, unless all its tensors are on that
    device already. A call without a device, such as ``to(memory_format=...)``, moves nothing.
    """
    if not is_8bit(model):
        return False
    device, dtype, _, _ = sys.modules["torch"]._C._nn._parse_to(*args, **kwargs)
    if dtype is not None:
        return False
    if device is None:
        return True
    return not is_group_offloaded(model) and (can_move(model) or _rests_on(model, device))


def move(model: Any, *args: Any, **kwargs: Any) -> None:
    """``model.to(*args, **kwargs)`` of an 8-bit model without checks; a move also updates its hooks (`align`)."""
    torch = sys.modules["torch"]
    torch.nn.Module.to(model, *args, **kwargs)
    device, _, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None:
        align(model)


def align(model: Any) -> None:
    """Set the hooks that move the inputs of ``model``, which is on one device, to its present device."""
    first = next(iter(model.parameters()), None)
    if "accelerate.hooks" not in sys.modules or first is None:
        return
    for module in model.modules():
        for hook in align_hooks(module):
            if hook.execution_device is not None:
                hook.execution_device = first.device


def asked_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The ``torch.device`` in the arguments of a pipeline's ``.to()``; None if there is none or it is invalid."""
    torch = sys.modules["torch"]
    found = [*args[:1], kwargs.get("device")]
    for value in found:
        if value is None or isinstance(value, torch.dtype):
            continue
        try:
            return torch.device(value)
        except (RuntimeError, TypeError):  # upstream raises the error
            return None
    return None


def _rests_on(model: Any, device: Any) -> bool:
    device = sys.modules["torch"].device(device)
    for module in model.modules():
        tensors = [*module._parameters.values(), *module._buffers.values()]
        tensors += [found.tensor for found in companions(module)]
        for tensor in tensors:
            if tensor is None:
                continue
            if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
                return False
    return True
