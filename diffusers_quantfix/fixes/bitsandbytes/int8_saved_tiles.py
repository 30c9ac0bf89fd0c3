"""An 8-bit model that has run is saved in its GPU's layout, and produces noise after loading.

Symptom: an 8-bit model saved after its first forward pass produces noise when diffusers or transformers loads the
    checkpoint; one saved before it does not. No error.
Cause: the first forward pass puts the weight into tiles, in the layout of the GPU's tensor cores. The state dict holds
    the tiles, with their layout in ``weight_format``. ``load_state_dict`` reads that; ``from_pretrained`` of diffusers
    and transformers does not, and treats the tiles as rows.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/releases/tag/0.45.0; bitsandbytes 0.45.0 no longer has
    tiles.
Patch: the state dict holds rows. They are moved to the CPU layer by layer: on the GPU, they would take as much memory
    as the tiles again.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.int8_params import in_tiles, rows_of

FIX = Fix(
    __doc__,
    id="bnb-int8-saved-tiles",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<0.45.0"},
    harm="wrong result",
    frames=("bitsandbytes/", "8.?bit|int8"),
    fixed_in="bitsandbytes 0.45.0",
    hot=True,
)

# In state dicts of 0.43.0, and of later releases.
_ROWS = ("row", 0)


def broken(modules: ModuleType) -> bool:
    """Save a layer with one tile whose order is known, so that no kernel is needed."""
    import torch

    layer_class = resolve(modules, "Linear8bitLt")
    # Without __init__, which needs a completely imported bitsandbytes.
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    layer.out_features, layer.in_features = 8, 32
    layer.weight = modules.Int8Params(torch.zeros(8, 32, dtype=torch.int8), requires_grad=False)
    layer.state = State()
    layer.state.CxB, layer.state.SCB = layer.weight.data, torch.zeros(8)
    layer.state._tile_indices = torch.arange(256).view(8, 32)
    saved: dict[str, torch.Tensor] = {}
    layer._save_to_state_dict(saved, "", False)
    return saved["weight_format"] not in _ROWS


class State:
    """The probe's stand-in for a ``MatmulLtState``."""

    CB = None
    has_fp16_weights = False
    formatB = "col_turing"


def patch(modules: ModuleType, draft: Draft) -> None:
    import torch

    def make(original):
        def _save_to_state_dict(self, destination, prefix, *args, **kwargs):
            original(self, destination, prefix, *args, **kwargs)
            said = destination.get(f"{prefix}weight_format")
            if said is not None and in_tiles(self):
                rows = _ROWS[0] if isinstance(said, str) else torch.tensor(_ROWS[1], dtype=torch.uint8)
                destination[f"{prefix}weight"] = rows_of(self).cpu()
                destination[f"{prefix}weight_format"] = rows

        return _save_to_state_dict

    draft.wrap_plain(resolve(modules, "Linear8bitLt"), "_save_to_state_dict", make)
