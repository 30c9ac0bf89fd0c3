"""8-bit weights are moved to the CPU through the first GPU.

Symptom: RuntimeError "Cannot access accelerator device when none is available." (or "Torch not compiled with CUDA
    enabled", "Found no NVIDIA driver") from ``accelerate.cpu_offload(model, "cpu")`` of an 8-bit model, and wherever
    else accelerate puts an 8-bit weight on the device "cpu". With a GPU, every such weight is moved to it and back.
Cause: ``set_module_tensor_to_device`` calls ``.to(0).to("cpu")`` for Int8Params if the device is the string "cpu":
    older bitsandbytes quantizes on a GPU only.
Upstream: not reported.
Patch: where bitsandbytes quantizes on the CPU, the device is passed as ``torch.device("cpu")``, for which accelerate
    uses its ordinary code path.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve
from ...weights.places import parameters_at

FIX = Fix(
    __doc__,
    id="accelerate-int8-on-cpu",
    module="accelerate.utils.modeling",
    claims={"accelerate": ">=0.34.2,<=1.15.0", "bitsandbytes": ">=0.46"},
    patterns=(
        "Cannot access accelerator device when none is available",
        "Torch not compiled with CUDA enabled",
        "Found no NVIDIA driver",
        "No CUDA GPUs are available",
    ),
    frames=(
        "accelerate/utils/modeling.py:set_module_tensor_to_device",
        "bitsandbytes/nn/modules.py:to",
        "accelerate/hooks.py:pre_forward",
    ),
    hot=True,
)


def broken(modeling: ModuleType) -> bool:
    """Put a stand-in for an 8-bit weight on the CPU, and check where it is sent."""
    import torch

    from ...loading.device import quantizes_on_cpu

    if not quantizes_on_cpu():
        return False  # 8-bit weights cannot be quantized on the CPU there

    class WentElsewhere(Exception):
        pass

    class Int8Params(torch.nn.Parameter):
        def __new__(cls, data, requires_grad=False, **_):
            return torch.Tensor._make_subclass(cls, data, requires_grad)

        def to(self, *args, **kwargs):
            if args and args[0] == 0:
                raise WentElsewhere
            return self

    module = torch.nn.Module()
    module.weight = Int8Params(torch.zeros(1, dtype=torch.int8))
    try:
        resolve(modeling, "set_module_tensor_to_device")(
            module, "weight", "cpu", value=torch.zeros(1, dtype=torch.int8)
        )
    except WentElsewhere:
        return True
    return False


def patch(modeling: ModuleType, draft: Draft) -> None:
    import torch

    cpu = torch.device("cpu")
    function = function_of(resolve(modeling, "set_module_tensor_to_device"))
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    # Its position: accelerate empties the caches of all devices, unless the device is the string "cpu".
    clears = names.index("clear_cache") - 3 if "clear_cache" in names else -1

    def make(original):
        def set_module_tensor_to_device(module, tensor_name, device, *args, **kwargs):
            if device == "cpu" and is_int8(module, tensor_name):
                device = cpu
                if len(args) <= clears:
                    kwargs.setdefault("clear_cache", False)
            return original(module, tensor_name, device, *args, **kwargs)

        return set_module_tensor_to_device

    def is_int8(module, path):
        parameters, name = parameters_at(module, path)
        return type(parameters.get(name)).__name__ == "Int8Params"

    draft.wrap_plain(modeling, "set_module_tensor_to_device", make)
