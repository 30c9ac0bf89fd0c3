"""``load_state_dict(assign=True)`` breaks 8-bit layers.

Symptom: RuntimeError "Loading a quantized checkpoint into non-quantized Linear8bitLt is not supported" from
    ``load_state_dict(assign=True)`` of an 8-bit layer with its own state dict. With weights that are not quantized yet
    there is no error, and the first move does not quantize the layer.
Cause: torch assigns the tensor of the state dict as a plain Parameter, and ``Linear8bitLt`` looks for SCB on it.
Upstream: not reported.
Patch: the assigned weight becomes an Int8Params again, with the scales of the state dict.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="bnb-int8-assign",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    patterns=("Loading a quantized checkpoint into non-quantized Linear8bitLt",),
    frames=(r"load_state_dict\([^()]{0,200}assign=True", "assign=True"),
)


def broken(modules: ModuleType) -> bool:
    """Assign a weight to a one-weight layer."""
    import torch

    layer_class = resolve(modules, "Linear8bitLt")
    # Without __init__, which needs a completely imported bitsandbytes.
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    layer.in_features = layer.out_features = 1
    layer.weight = modules.Int8Params(torch.zeros(1, 1), requires_grad=False)
    layer.state = State()
    assign = {"assign_to_params_buffers": True}
    layer._load_from_state_dict({"weight": torch.zeros(1, 1)}, "", assign, True, [], [], [])
    return not isinstance(layer.weight, modules.Int8Params)


class State:
    """The probe's stand-in for a ``MatmulLtState``."""

    CxB = CB = SCB = None
    has_fp16_weights = False


def patch(modules: ModuleType, draft: Draft) -> None:
    import torch

    int8_params = resolve(modules, "Int8Params")

    def make(original):
        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args, **kwargs):
            before, given = self._parameters.get("weight"), state_dict.get(f"{prefix}weight")
            if (
                not local_metadata.get("assign_to_params_buffers", False)
                or not isinstance(before, int8_params)
                or self.state.has_fp16_weights
                or given is None
                or given.is_meta
            ):
                return original(self, state_dict, prefix, local_metadata, *args, **kwargs)
            scales = state_dict.get(f"{prefix}SCB")
            if (given.dtype == torch.int8) != (scales is not None):
                return original(self, state_dict, prefix, local_metadata, *args, **kwargs)
            rest = {key: value for key, value in state_dict.items() if key != f"{prefix}SCB"}
            original(self, rest, prefix, local_metadata, *args, **kwargs)
            if self._parameters["weight"] is not before:
                restore(self, before, scales)
            return None

        return _load_from_state_dict

    def restore(layer, before, scales):
        """Turn the weight that torch assigned into an Int8Params, and reset the layer to before its first run."""
        data = layer._parameters["weight"].data
        new = torch.Tensor._make_subclass(type(before), data, before.requires_grad)
        vars(new).update(vars(before))
        new.CB = new.SCB = None
        if scales is not None:
            new.CB, new.SCB = new.data, scales.detach().to(data.device)
        layer._parameters["weight"] = new
        state = layer.state
        for name in ("CB", "CxB", "SB", "SCB", "_tile_indices"):  # the tiles: before 0.45.0
            if name in vars(state):  # the others are None, and newer releases warn on access
                setattr(state, name, None)

    draft.wrap_plain(resolve(modules, "Linear8bitLt"), "_load_from_state_dict", make)
