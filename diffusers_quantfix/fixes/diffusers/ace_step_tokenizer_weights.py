"""ACE-Step's audio tokenizer computes with the bytes of quantized weights.

Symptom: RuntimeError "mat1 and mat2 shapes cannot be multiplied" (4-bit) or ValueError "The dtype of a weights Tensor
    cannot be changed" (quanto) from ``_AceStepResidualFSQ``; no error in 8-bit, but its codes are noise.
Cause: ``_AceStepResidualFSQ`` passes ``project_in.weight.float()`` and ``project_out.weight.float()`` to
    ``torch.nn.functional.linear``: for an 8-bit layer, the int8 codes without their scales.
Upstream: not reported.
Patch: if a weight is quantized, its layer is called.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import LayerCalled, packed_stand_in, with_called_weights
from ...surroundings import on_meta

FIX = Fix(
    __doc__,
    id="diffusers-ace-step-tokenizer-weights",
    module="diffusers.pipelines.ace_step.modeling_ace_step",
    claims={"diffusers": ">=0.38.0,<=0.42.1"},
    harm="wrong result",
    since="0.1.0",
    patterns=(
        r"_AceStepResidualFSQ|(modeling_ace_step.{0,2000}(mat1 and mat2|dtype of a .{0,30} cannot be changed))",
    ),
    frames=("diffusers/pipelines/ace_step/modeling_ace_step.py:(forward|get_output_from_indices)",),
    hot=True,
)

_CLASS = "_AceStepResidualFSQ"


def broken(modeling_ace_step: ModuleType) -> bool:
    """Is a layer with a packed weight called?"""
    import torch

    with on_meta():
        quantizer = resolve(modeling_ace_step, _CLASS)(1)
        quantizer.project_out = packed_stand_in(1)
        try:
            quantizer.get_output_from_indices(torch.empty(1, 1, dtype=torch.long))
        except LayerCalled:
            return False
        except RuntimeError:
            return True
    return True


def patch(modeling_ace_step: ModuleType, draft: Draft) -> None:
    def make(original):
        def act(self, *args, **kwargs):
            return original(with_called_weights(self, "project_in", "project_out"), *args, **kwargs)

        return act

    for name in ("forward", "get_output_from_indices"):
        draft.wrap_plain(resolve(modeling_ace_step, _CLASS), name, make)
