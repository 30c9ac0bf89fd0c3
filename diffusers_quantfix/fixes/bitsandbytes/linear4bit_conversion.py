"""``.to("meta")``, ``.to_empty()`` and torch's swap mode break 4-bit layers.

Symptom: RuntimeError "Creating a Parameter from an instance of type Params4bit requires that detach() returns an
    instance of the same type" from ``model.to("meta")``, "_apply(): Couldn't swap Linear4bit.weight" with
    ``torch.__future__.set_swap_module_params_on_conversion(True)``; after ``.to_empty()`` the weight is a plain
    Parameter.
Cause: if ``nn.Module._apply`` cannot put the new bytes into the old parameter, it creates a plain Parameter.
Upstream: none.
Patch: ``_apply`` of the two layers with a 4-bit weight passes the plain bytes to upstream. The parameter that upstream
    creates from them becomes a Params4bit again, with all attributes of the old one. Moves that upstream handles
    correctly are left to it.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights import companions

FIX = Fix(
    __doc__,
    id="bnb-linear4bit-conversion",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    patterns=(
        r"Creating a Parameter from an instance of type Params4bit requires that detach\(\)",
        r"_apply\(\): Couldn't swap \w*4bit\.weight",
    ),
    frames=("to_empty", r"to\('meta'\)"),
    hot=True,
)


def broken(modules: ModuleType) -> bool:
    """Call ``to_empty`` on a quantized layer's parent with ``meta``, a device that always exists."""
    import torch

    layer_class = resolve(modules, "Linear4bit")
    # Without __init__, which needs a completely imported bitsandbytes.
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    layer.weight = modules.Params4bit(
        torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False, bnb_quantized=True
    )
    layer.quant_state = None
    torch.nn.Sequential(layer).to_empty(device="meta")
    return not isinstance(layer.weight, modules.Params4bit)


def patch(modules: ModuleType, draft: Draft) -> None:
    import torch

    params4bit = resolve(modules, "Params4bit")

    def make(original):
        def _apply(self, fn, recurse=True):
            weight = self._parameters.get("weight")
            if not isinstance(weight, params4bit):
                return original(self, fn, recurse)
            cls, held, followed = type(weight), {}, True

            def moved(tensor):
                nonlocal followed
                if tensor is not weight:
                    return fn(tensor)
                result = fn(weight)
                followed = isinstance(result, params4bit)
                held.update(vars(weight))
                if followed:
                    held["quant_state"] = result.quant_state
                    held["bnb_quantized"] = weight.bnb_quantized
                return result.data  # nn.Module._apply cannot make a Parameter from a Params4bit

            original(self, moved, recurse)
            new = self._parameters["weight"]
            if type(new) is not cls:
                new.__class__ = cls
                vars(new).update(held)
                followed = False
            elif (
                followed
            ):  # upstream took the bytes; the quant state may be a new one (bnb-params4bit-shared-state)
                new.quant_state = held["quant_state"]
                if vars(self).get("quant_state") is not None:
                    self.quant_state = new.quant_state
            if not followed:  # Params4bit.to was not called: to_empty(), and .cpu() before 0.46.0
                rejoin(self, new)
            return self

        return _apply

    def rejoin(layer, weight):
        """Move the quant state to the device of ``weight``, and set it on the layer."""
        state = weight.quant_state
        if state is not None and not weight.is_meta and companions.is_host_copy(state):
            state = weight.quant_state = companions.on_device(state, weight.device)
        if vars(layer).get("quant_state") is not None:
            layer.quant_state = state
        if weight.is_meta:  # its quant state waits on the CPU (bnb-quant-state-meta)
            return
        for found in companions.companions(layer):
            tensor = found.tensor
            if tensor.is_meta:
                tensor = torch.empty_like(tensor, device=weight.device)  # as to_empty() does with the weight
            setattr(found.holder, found.attribute, tensor.to(weight.device))

    draft.wrap_plain(resolve(modules, "Linear4bit"), "_apply", make)
    if hasattr(modules, "Embedding4bit"):  # from 0.44.0 on
        draft.wrap_plain(modules.Embedding4bit, "_apply", make)
