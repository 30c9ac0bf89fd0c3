"""A device map that has the CPU alone leaves a torchao model as it is, or refuses its checkpoint.

Symptom: a model loaded with ``TorchAoConfig`` and ``device_map={"": "cpu"}``, or with ``device_map="auto"`` on a
    machine without a GPU, has no quantized weight, though ``is_quantized`` is True; nothing says so. A quantized
    checkpoint raises ValueError "You are attempting to perform cpu/disk offload with a pre-quantized torchao model".
    ``device_map="cpu"`` quantizes.
Cause: ``validate_environment`` takes every map in which "cpu" stands for one that offloads to the CPU what runs on
    another device, whose offloaded weights it does not quantize. From "cpu" diffusers makes a ``torch.device``, for
    which it does not look. ``_process_model_before_weight_loading`` leaves the parts of a map of several out, too.
Upstream: not reported. transformers, from which it comes, leaves maps of one entry out.
Patch: for a map in which every device is "cpu" both are called as without a map. Nothing is offloaded by it; with a
    ``torch.device`` beside the name accelerate does offload.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-torchao-cpu-map",
    module="diffusers.quantizers.torchao.torchao_quantizer",
    # Before 0.36 a configuration by name asks for a GPU first.
    claims={"diffusers": ">=0.36.0,<=0.42.1", "torchao": ""},
    patterns=("attempting to perform cpu/disk offload with a pre-quantized torchao model",),
    frames=("torchao_quantizer.py:validate_environment", "device_map"),
    harm="wrong result",
)

_CLASS, _METHOD = "TorchAoHfQuantizer", "validate_environment"


def broken(torchao_quantizer: ModuleType) -> bool:
    """Validate a map of the CPU alone; is it one that offloads?"""
    cls = resolve(torchao_quantizer, _CLASS)
    quantizer = cls.__new__(cls)
    quantizer.pre_quantized = False
    try:
        resolve(cls, _METHOD)(quantizer, device_map={"": "cpu"})
    except RuntimeError:  # a torchao that this diffusers refuses
        return False
    return bool(quantizer.offload)


def patch(torchao_quantizer: ModuleType, draft: Draft) -> None:
    def make_validate(original):
        def validate_environment(self, *args, **kwargs):
            if _cpu_alone(kwargs.get("device_map")):
                kwargs["device_map"] = None
            return original(self, *args, **kwargs)

        return validate_environment

    def make_before(original):
        def _process_model_before_weight_loading(self, model, device_map, *args, **kwargs):
            return original(self, model, None if _cpu_alone(device_map) else device_map, *args, **kwargs)

        return _process_model_before_weight_loading

    cls = resolve(torchao_quantizer, _CLASS)
    draft.wrap_plain(cls, _METHOD, make_validate)
    draft.wrap_plain(cls, "_process_model_before_weight_loading", make_before)


def _cpu_alone(device_map: object) -> bool:
    """Whether it is a map, and each of its devices is the CPU by name."""
    if not isinstance(device_map, dict) or not device_map:
        return False
    return all(isinstance(device, str) and device == "cpu" for device in device_map.values())
