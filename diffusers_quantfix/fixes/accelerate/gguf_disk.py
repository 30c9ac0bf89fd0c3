"""GGUF models cannot be offloaded to disk.

Symptom: ``accelerate.disk_offload`` of a GGUF model, and ``dispatch_model`` with "disk" in its map, raise "KeyError:
    None" in the first run.
Cause: only the bytes are read from disk. ``set_module_tensor_to_device`` makes a parameter of the old class from them,
    ``type(parameter)(bytes, requires_grad=...)``, and a GGUFParameter needs a quantization type.
Upstream: not reported; the same in memory is https://github.com/huggingface/diffusers/issues/14691.
Patch: the bytes get the quantization type of the parameter they replace.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.places import parameters_at

FIX = Fix(
    __doc__,
    id="accelerate-gguf-disk",
    module="accelerate.utils.modeling",
    claims={"accelerate": ">=0.34.2,<=1.15.0", "diffusers": "", "gguf": ""},
    since="0.1.0",
    patterns=("KeyError: None",),
    frames=(
        "disk_offload",
        "gguf/utils.py:__new__",
        "GGUF",
        "accelerate/utils/modeling.py:set_module_tensor_to_device",
    ),
    hot=True,
)


def broken(modeling: ModuleType) -> bool:
    """Replace a parameter that is built like GGUF's with bytes; diffusers need not be loaded."""
    import torch

    class GGUFParameter(torch.nn.Parameter):
        def __new__(cls, data, requires_grad=False, quant_type=None):
            made = torch.Tensor._make_subclass(cls, data, requires_grad)
            made.quant_type = quant_type or getattr(data, "quant_type", None)
            return made

        def to(self, *args, **kwargs):
            return self

    module = torch.nn.Module()
    module.weight = GGUFParameter(torch.zeros(1), quant_type="a type")
    resolve(modeling, "set_module_tensor_to_device")(module, "weight", "cpu", value=torch.ones(1))
    return module.weight.quant_type is None


def patch(modeling: ModuleType, draft: Draft) -> None:
    def make(original):
        def set_module_tensor_to_device(module, tensor_name, device, value=None, *args, **kwargs):
            if value is not None and not hasattr(value, "quant_type"):
                parameters, name = parameters_at(module, tensor_name)
                held: Any = parameters.get(name)
                if type(held).__name__ == "GGUFParameter" and value.shape == held.shape:
                    value = type(held)(value, quant_type=held.quant_type)
            return original(module, tensor_name, device, value, *args, **kwargs)

        return set_module_tensor_to_device

    draft.wrap_plain(modeling, "set_module_tensor_to_device", make)
