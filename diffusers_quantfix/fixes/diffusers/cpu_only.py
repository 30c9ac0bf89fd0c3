"""Bitsandbytes models cannot be loaded or dequantized without a GPU.

Symptom: RuntimeError "No GPU found. A GPU is needed for quantization." from ``from_pretrained`` with a bitsandbytes
    config, and ValueError "Some modules are dispatched on the CPU or the disk" with ``device_map="cpu"``;
    ``dequantize()`` of a 4-bit model on the CPU raises "Torch not compiled with CUDA enabled", on Apple GPUs too.
Cause: bitsandbytes 0.46 and newer quantizes and runs on the CPU. ``validate_environment``, ``update_device_map`` and
    ``_dequantize`` of its quantizers in diffusers support accelerators only.
Upstream: not reported for diffusers; transformers allows it.
Patch: without an accelerator, or when the whole model is requested on the CPU, these methods see a torch whose
    accelerator is the CPU; all other checks remain upstream's own. With bitsandbytes 0.46, fp4 raises an error at the
    start, since it has no CPU kernel for fp4. An older bitsandbytes cannot quantize on the CPU at all: upstream's error
    remains.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...engine.versions import is_installed

FIX = Fix(
    __doc__,
    id="diffusers-cpu-only",
    module="diffusers.quantizers.bitsandbytes.bnb_quantizer",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "bitsandbytes": ">=0.46"},
    patterns=(
        r"No GPU found\. A GPU is needed for quantization",
        "Some modules are dispatched on the CPU or the disk",
    ),
    frames=("bnb_quantizer.py:validate_environment",),
    asked_once=True,
)

_QUANTIZERS = ("BnB4BitDiffusersQuantizer", "BnB8BitDiffusersQuantizer")
_NO_GPU = "No GPU found"


def broken(bnb_quantizer: ModuleType) -> bool:
    """Whether a method contains the message that a GPU is needed."""
    from ...loading.device import quantizes_on_cpu

    validate = resolve(bnb_quantizer, "BnB4BitDiffusersQuantizer.validate_environment")
    if not quantizes_on_cpu():
        return False  # the message is true then
    return any(_NO_GPU in name for name in names_used(validate))


def patch(bnb_quantizer: ModuleType, draft: Draft) -> None:
    from types import FunctionType, SimpleNamespace

    import torch

    class OnCpu:
        """torch, with the CPU as the only device of its only accelerator."""

        cuda = SimpleNamespace(is_available=lambda: True, current_device=lambda: "cpu")
        xpu = mps = SimpleNamespace(is_available=lambda: False)

        def __getattr__(self, name):
            return getattr(torch, name)

    def on_cpu(function):
        """Upstream's ``function``, with that torch."""
        if not isinstance(function, FunctionType):
            return function
        seen = {**function.__globals__, "torch": OnCpu()}
        twin = FunctionType(
            function.__code__, seen, function.__name__, function.__defaults__, function.__closure__
        )
        twin.__kwdefaults__ = function.__kwdefaults__
        return twin

    def make_validate(original):
        def validate_environment(self, *args, **kwargs):
            wholly = is_cpu(kwargs.get("device_map"))
            if not wholly:
                try:
                    return original(self, *args, **kwargs)
                except RuntimeError as error:
                    if _NO_GPU not in str(error):
                        raise
            else:
                kwargs = {**kwargs, "device_map": None}
            refuse_fp4(self.quantization_config)
            return on_cpu(original)(self, *args, **kwargs)

        return validate_environment

    def make_update(original):
        def update_device_map(self, device_map):
            if device_map is None and not any_accelerator():
                return {"": "cpu"}
            return original(self, device_map)

        return update_device_map

    def make_dequantize(original):
        def _dequantize(self, model):
            # On Apple GPUs too: calling CUDA crashes there, and the weights are on the CPU.
            if torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()):
                return original(self, model)
            return on_cpu(original)(self, model)

        return _dequantize

    def refuse_fp4(config):
        if not getattr(config, "load_in_4bit", False) or getattr(config, "bnb_4bit_quant_type", "") != "fp4":
            return
        import bitsandbytes

        if is_installed("bitsandbytes", "<0.47"):
            raise ValueError(
                f"bitsandbytes {bitsandbytes.__version__} has no fp4 on the CPU, and there is no GPU for this model:"
                ' pass bnb_4bit_quant_type="nf4", or upgrade to bitsandbytes>=0.47.'
            )

    def is_cpu(device_map):
        return isinstance(device_map, dict) and {str(value) for value in device_map.values()} == {"cpu"}

    def any_accelerator():
        return (
            torch.cuda.is_available()
            or (hasattr(torch, "xpu") and torch.xpu.is_available())
            or torch.backends.mps.is_available()
        )

    for name in _QUANTIZERS:
        quantizer = resolve(bnb_quantizer, name)
        draft.wrap_plain(quantizer, "validate_environment", make_validate)
        if "update_device_map" in vars(quantizer):  # since 0.33.0
            draft.wrap_plain(quantizer, "update_device_map", make_update)
        draft.wrap_plain(quantizer, "_dequantize", make_dequantize)
