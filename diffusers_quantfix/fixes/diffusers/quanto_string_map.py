"""from_pretrained with quanto fails for device_map="auto".

Symptom: TypeError "'in <string>' requires string as left operand, not NoneType" from ``from_pretrained`` with a
    ``QuantoConfig`` and ``device_map="auto"``, "balanced", "balanced_low_0" or "sequential".
Cause: without ``modules_to_not_convert`` the quantizer's list of them is ``[None]``, and the plan looks for each entry
    in the parameter names. The bitsandbytes and torchao quantizers remove the None.
Upstream: not reported; diffusers drops quanto with 1.0.
Patch: the None is removed from the list after the layers have been replaced.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.versions import is_installed

FIX = Fix(
    __doc__,
    id="diffusers-quanto-string-map",
    module="diffusers.quantizers.quanto.quanto_quantizer",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "optimum-quanto": ">=0.2.6,<=0.2.7"},
    patterns=("'in <string>' requires string as left operand, not NoneType",),
    frames=("quanto", "device_map", "from_pretrained"),
    asked_once=True,
)

_METHOD = "_process_model_before_weight_loading"


def broken(quanto_quantizer: ModuleType) -> bool:
    """Let it prepare a model without replacing layers, and check the list."""
    from types import FunctionType, SimpleNamespace

    method = resolve(quanto_quantizer, f"QuantoQuantizer.{_METHOD}")
    # With an older quanto the quantizer refuses to work at all.
    if not is_installed("optimum-quanto", ">=0.2.6"):
        return False
    # Replacing layers would import quanto.
    seen = {**method.__globals__, "_replace_with_quanto_layers": lambda model, **kwargs: model}
    twin = FunctionType(method.__code__, seen, method.__name__, method.__defaults__, method.__closure__)
    twin.__kwdefaults__ = method.__kwdefaults__
    config = SimpleNamespace(modules_to_not_convert=None)
    quantizer = SimpleNamespace(quantization_config=config, pre_quantized=False, modules_to_not_convert=[])
    twin(quantizer, SimpleNamespace(config=SimpleNamespace()), device_map=None, keep_in_fp32_modules=[])
    return None in quantizer.modules_to_not_convert


def patch(quanto_quantizer: ModuleType, draft: Draft) -> None:
    def make(original):
        def _process_model_before_weight_loading(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            self.modules_to_not_convert = [name for name in self.modules_to_not_convert if name is not None]
            return result

        return _process_model_before_weight_loading

    draft.wrap_plain(resolve(quanto_quantizer, "QuantoQuantizer"), _METHOD, make)
