"""Shap-E's renderer ignores the object with quantized layers, or cannot run.

Symptom: with quanto, every Shap-E image shows the same thing; with bitsandbytes and torchao the run fails with an error
    such as "shape '[64, 93, 64]' is invalid for input of size 190464".
Cause: ``ShapERenderer`` computes its MLP's weights from the latents, and copies them into the MLP's state dict under
    the names of plain layers. quanto's have other names, and are skipped; packed weights cannot be copied into.
Upstream: not reported.
Patch: an error that says what to do instead, before the first copy. There is nothing to quantize: the MLP's weights are
    computed anew for every object.
"""

from __future__ import annotations

import sys
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...models.plain_weights import is_plain

FIX = Fix(
    __doc__,
    id="diffusers-shap-e-quantized-renderer",
    module="diffusers.pipelines.shap_e.renderer",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    harm="wrong result",
    since="0.1.0",
    patterns=(
        r"shap_e/renderer.{0,2000}(shape '.{0,40}' is invalid for input|same dtype|unimplemented operator)",
    ),
    frames=("diffusers/pipelines/shap_e/renderer.py",),
    asked_once=True,
)

QUANTIZED = (
    "the renderer of Shap-E cannot be quantized, it computes the weights of its layers from the latents: load "
    "`shap_e_renderer` without a quantization config, and name the other components in `components_to_quantize`"
)
_METHODS = ("decode_to_image", "decode_to_mesh")


def broken(renderer: ModuleType) -> bool:
    """Do they copy into the state dict, whatever is in it?"""
    decode = [resolve(renderer, f"ShapERenderer.{name}") for name in _METHODS]
    return any("copy_" in names_used(one) for one in decode)


def patch(renderer: ModuleType, draft: Draft) -> None:
    def make(original):
        def decode(self, *args, **kwargs):
            linear = sys.modules["torch"].nn.Linear
            if not all(is_plain(layer) for layer in self.modules() if isinstance(layer, linear)):
                raise ValueError(QUANTIZED)
            return original(self, *args, **kwargs)

        return decode

    for name in _METHODS:
        draft.wrap_plain(resolve(renderer, "ShapERenderer"), name, make)
