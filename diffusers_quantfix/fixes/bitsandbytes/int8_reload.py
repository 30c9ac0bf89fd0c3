"""load_state_dict of an 8-bit layer fails after its first forward pass.

Symptom: RuntimeError "Loading a quantized checkpoint into non-quantized Linear8bitLt is not supported. Please call
    module.cuda() before module.load_state_dict()" from ``load_state_dict`` with the layer's own state dict.
Cause: the first forward pass moves CB and SCB from the weight into ``layer.state``. ``_load_from_state_dict`` looks for
    SCB on the weight only.
Upstream: none.
Patch: during loading the weight refers to the state's scales, the same tensor, so upstream copies into it. Before
    0.45.0, a layer that has run keeps its weight in tiles of the GPU's layout; it is converted back to rows first.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.int8_params import in_tiles, rows_of

FIX = Fix(
    __doc__,
    id="bnb-int8-reload",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    patterns=("Loading a quantized checkpoint into non-quantized Linear8bitLt",),
    frames=("load_state_dict",),
    hot=True,
)


def broken(modules: ModuleType) -> bool:
    """Load SCB into a layer that has it in its state, as after a forward pass."""
    import torch

    layer_class = resolve(modules, "Linear8bitLt")
    # Without __init__, which needs a completely imported bitsandbytes.
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    layer.weight = modules.Int8Params(torch.zeros(1, 1, dtype=torch.int8), requires_grad=False)
    layer.state = State()
    layer.state.SCB = torch.zeros(1)
    try:
        layer._load_from_state_dict(
            {"weight": layer.weight.data, "SCB": torch.ones(1)}, "", {}, True, [], ["SCB"], []
        )
    except RuntimeError:
        return True
    return not torch.equal(layer.state.SCB, torch.ones(1))


class State:
    """The probe's stand-in for a ``MatmulLtState``."""

    CxB = CB = SCB = None
    has_fp16_weights = False


def patch(modules: ModuleType, draft: Draft) -> None:
    def make(original):
        def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
            args = state_dict, prefix, *args
            weight, state = self.weight, self.state
            # PEFT loads a LoRA through the whole model, with no entries for its 8-bit layers.
            if f"{prefix}weight" not in state_dict and f"{prefix}SCB" not in state_dict:
                return original(self, *args, **kwargs)
            if state.SCB is None or state.has_fp16_weights or getattr(weight, "SCB", None) is not None:
                return original(self, *args, **kwargs)
            if in_tiles(self):
                back_to_rows(self)
                return original(self, *args, **kwargs)
            weight.SCB = state.SCB
            try:
                return original(self, *args, **kwargs)
            finally:
                weight.SCB = None

        return _load_from_state_dict

    def back_to_rows(layer):
        """Reset ``layer`` to the state before its first forward pass; rows cannot be loaded into a weight in tiles."""
        weight, state = layer.weight, layer.state
        weight.data = rows_of(layer)
        weight.CB, weight.SCB = weight.data, state.SCB
        state.CB = state.CxB = state.SB = state.SCB = state._tile_indices = None

    draft.wrap_plain(resolve(modules, "Linear8bitLt"), "_load_from_state_dict", make)
