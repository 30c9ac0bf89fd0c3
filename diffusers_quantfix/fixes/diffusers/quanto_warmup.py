"""A saved model with quanto weights cannot be loaded with a device_map.

Symptom: AttributeError "Parameter or buffer with name=...weight._data not found in model" from ``from_pretrained`` of a
    model quantized by quanto, with any ``device_map`` that names an accelerator.
Cause: the caching allocator is warmed up for the names in the checkpoint, and the parts of quanto weights
    (``weight._data``, ``weight._scale``) are not parameters of the model.
Upstream: not reported; diffusers drops quanto with 1.0.
Patch: these parts are left out of the warm-up, which only saves time.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.versions import is_installed

FIX = Fix(
    __doc__,
    id="diffusers-quanto-warmup",
    module="diffusers.models.model_loading_utils",
    claims={"diffusers": ">=0.35.0,<=0.42.1", "optimum-quanto": ">=0.2.6,<=0.2.7"},
    patterns=(r"Parameter or buffer with name=\S*\._data'? not found",),
    frames=("quanto", "_caching_allocator_warmup"),
    asked_once=True,
)

_WARM_UP = "_caching_allocator_warmup"
_PARTS = ("._data", "._scale", "._shift")


def broken(model_loading_utils: ModuleType) -> bool:
    """Warm up for a part of a weight that a model without parameters does not have."""
    from types import SimpleNamespace

    import torch

    warm_up = resolve(model_loading_utils, _WARM_UP)
    # With an older quanto the quantizer refuses to work at all.
    if not is_installed("optimum-quanto", ">=0.2.6"):
        return False
    quantizer = SimpleNamespace(get_cuda_warm_up_factor=lambda: 4, pre_quantized=True)
    try:
        warm_up(torch.nn.Module(), {"weight._data": torch.device("meta")}, torch.float32, quantizer)
    except AttributeError as error:
        return "not found in model" in str(error)
    return False


def patch(model_loading_utils: ModuleType, draft: Draft) -> None:
    def make(original):
        def _caching_allocator_warmup(model, expanded_device_map, dtype, hf_quantizer=None):
            config = getattr(hf_quantizer, "quantization_config", None)
            method = getattr(config, "quant_method", None)
            if getattr(method, "value", method) == "quanto":
                expanded_device_map = {
                    name: device for name, device in expanded_device_map.items() if not name.endswith(_PARTS)
                }
            return original(model, expanded_device_map, dtype, hf_quantizer)

        return _caching_allocator_warmup

    draft.wrap_plain(model_loading_utils, _WARM_UP, make)
