"""AnimateDiff cannot run with quantized layers.

Symptom: TypeError "Linear4bit.forward() got an unexpected keyword argument 'input'" (the same with ``Linear8bitLt`` and
    ``GGUFLinear``) from every AnimateDiff pipeline whose UNet is quantized.
Cause: ``AnimateDiffTransformer3D.forward`` calls ``proj_in(input=...)`` and ``proj_out(input=...)``, the argument's
    name in ``torch.nn.Linear``. The layers that replace it name it ``x`` or ``inputs``.
Upstream: not reported.
Patch: these two calls pass it by position.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import own_function, recompiled

FIX = Fix(
    __doc__,
    id="diffusers-motion-linear-input",
    module="diffusers.models.unets.unet_motion_model",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    since="0.1.0",
    patterns=(r"Linear\w*\.forward\(\) got an unexpected keyword argument 'input'",),
    frames=("diffusers/models/unets/unet_motion_model.py:forward",),
    hot=True,
)

_CALLED = ("self.proj_in", "self.proj_out")


class _Reached(Exception):
    """The layer was called, by position."""


def broken(unet_motion_model: ModuleType) -> bool:
    """Does a block call a layer with a keyword that the layer does not have?"""
    import torch

    class Layer(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            raise _Reached

    block = resolve(unet_motion_model, "AnimateDiffTransformer3D")
    made = block(1, 1, in_channels=1, num_layers=0, norm_num_groups=1)
    made.proj_in = Layer()
    try:
        made(torch.zeros(1, 1, 2, 2))
    except _Reached:
        return False
    except TypeError as error:
        return "unexpected keyword argument 'input'" in str(error)
    return False


def patch(unet_motion_model: ModuleType, draft: Draft) -> None:
    """Replace the code of ``AnimateDiffTransformer3D.forward``."""
    import ast

    class Exchange(ast.NodeTransformer):
        found = 0

        def visit_Call(self, node):
            self.generic_visit(node)
            named = [keyword.arg for keyword in node.keywords]
            if named == ["input"] and not node.args and ast.unparse(node.func) in _CALLED:
                self.found += 1
                node.args = [node.keywords.pop().value]
            return node

    function = own_function(unet_motion_model, "AnimateDiffTransformer3D.forward")
    exchange = Exchange()
    code = recompiled(function, exchange)
    if exchange.found != len(_CALLED):
        raise TargetMissing("AnimateDiffTransformer3D calls its layers differently")
    draft.replace(function, "__code__", code)
