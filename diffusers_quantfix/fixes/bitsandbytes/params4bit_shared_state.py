"""Moving a 4-bit parameter also moves the quant state of its source.

Symptom: after ``{name: p.cpu() for name, p in model.named_parameters()}`` the model on the GPU raises "Expected all
    tensors to be on the same device" or "All input tensors need to be on the same GPU".
Cause: ``Params4bit.to`` moves the tensors of its QuantState in place, and the new parameter shares that QuantState.
Upstream: none.
Patch: ``Params4bit.to`` gives the new parameter its own QuantState. But ``nn.Module._apply`` relies on the shared one:
    it keeps the old parameter and takes only the bytes of the new one, with ``parameter.data = new``. So when ``.data``
    is assigned from a 4-bit parameter on another device, the quant state is taken over too, whatever module owns the
    parameter, and the reference in the layer is updated.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights import companions, params_4bit

FIX = Fix(
    __doc__,
    id="bnb-params4bit-shared-state",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    patterns=("Expected all tensors to be on the same device", "is on cpu, not on cuda"),
    frames=("matmul_4bit", "gemm_4bit", "absmax", "dequantize_4bit"),
    hot=True,
)


def broken(modules: ModuleType) -> bool:
    """Move a parameter to its own device; is the quant state that it keeps moved?"""
    import torch

    resolve(modules, "Params4bit.to")

    base: Any = resolve(modules, "QuantState")

    class QuantState(base):
        asked = False

        def to(self, device):
            self.asked = True

    state = QuantState(absmax=torch.zeros(1), shape=torch.Size((64, 1)), code=torch.zeros(16), blocksize=64)
    packed = torch.zeros(32, 1, dtype=torch.uint8)
    modules.Params4bit(packed, quant_state=state, bnb_quantized=True).to("cpu")
    return state.asked


def patch(modules: ModuleType, draft: Draft) -> None:
    import torch

    params4bit = resolve(modules, "Params4bit")
    parse = torch._C._nn._parse_to
    # Comparing devices is six times as fast as reading a device's type.
    meta = (torch.device("meta"), torch.device("meta", 0))

    def make_to(original):
        def to(self, *args, **kwargs):
            held = self.__dict__
            state = held.get("quant_state")
            if state is None or not held.get("bnb_quantized"):
                return original(self, *args, **kwargs)
            device = parse(*args, **kwargs)[0]
            elsewhere = not self.is_cpu and not self.is_meta
            if elsewhere and self.device == device and state.absmax.device == device:
                return params_4bit.moved(
                    self, state, args, kwargs
                )  # nothing moves: less work than upstream does
            if not companions.is_quant_state(state):
                return original(self, *args, **kwargs)
            # A cast does not move the quant state. bnb-quant-state-meta handles moves to meta and back.
            if device is None or device in meta or companions.is_host_copy(state):
                return original(self, *args, **kwargs)
            params_4bit.unpack(self)
            new_state = companions.on_device(state, device)
            result = params_4bit.moved(self, new_state, args, kwargs)
            if params_4bit.belongs_to_layer(self):
                result.module = None  # a copy, which does not belong to the layer and must not keep it alive
            else:  # made to replace the layer's weight
                params_4bit.follow(self, state, new_state)
            return result

        return to

    def make_setattr(original):
        def __setattr__(self, name, value):
            if name == "data" and isinstance(value, params4bit):
                return take_over(self, value)
            return original(self, name, value)

        def take_over(parameter, other):
            state, new_state = parameter.__dict__.get("quant_state"), other.__dict__.get("quant_state")
            # A parameter created from the bytes of another one may have any quant state.
            elsewhere = parameter.untyped_storage()._cdata != other.untyped_storage()._cdata
            original(parameter, "data", other)
            if elsewhere and state is not None and new_state is not None and state is not new_state:
                parameter.quant_state = new_state
                params_4bit.follow(parameter, state, new_state)

        return __setattr__

    def make_apply(original):
        def _apply(self, fn, recurse=True):
            result = original(self, fn, recurse)
            state = getattr(self._parameters.get("weight"), "quant_state", None)
            # A loaded parameter may not know its layer. Such a layer refers to no quant state of its own, and must not
            # start to: nothing would pass it the next one.
            if state is not None and vars(self).get("quant_state") is not None:
                self.quant_state = state
            return result

        return _apply

    draft.wrap_plain(params4bit, "to", make_to)
    draft.wrap_plain(params4bit, "__setattr__", make_setattr)
    draft.wrap_plain(resolve(modules, "Linear4bit"), "_apply", make_apply)
    if hasattr(modules, "Embedding4bit"):  # from 0.44.0 on
        draft.wrap_plain(modules.Embedding4bit, "_apply", make_apply)
