"""Quantized layers refuse their input as a keyword.

Symptom: TypeError "Linear4bit.forward() got an unexpected keyword argument 'input'" (the same with ``Linear8bitLt``)
    from every AnimateDiff pipeline whose UNet is quantized.
Cause: the layers of bitsandbytes stand in for ``torch.nn.Linear``, whose ``forward`` names its argument ``input``;
    theirs is ``x``. ``AnimateDiffTransformer3D`` of diffusers calls ``proj_in(input=...)`` and ``proj_out(input=...)``.
Upstream: not reported.
Patch: ``forward`` of both layers accepts ``input`` too, for every caller that writes what torch's layer allows.
"""

from __future__ import annotations

from ...engine.fix import Fix
from ...engine.probe import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from ...engine.draft import Draft

FIX = Fix(
    id="bnb-linear-input",
    title="quantized layers refuse their input as a keyword",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    upstream=(),
    symptom="TypeError: Linear4bit.forward() got an unexpected keyword argument 'input'",
    since="0.1.0",
    patterns=(r"Linear(4bit|8bitLt)\.forward\(\) got an unexpected keyword argument 'input'",),
    frames=("diffusers/models/unets/unet_motion_model.py:forward",),
    hot=True,
)

_NAMES = ("Linear4bit", "Linear8bitLt")


def broken(modules: ModuleType) -> bool:
    """Does the ``forward`` of a layer refuse the name that ``torch.nn.Linear`` gives its argument?"""
    return any(not _takes_input(resolve(modules, name)) for name in _NAMES)


def _takes_input(layer: type) -> bool:
    try:
        layer.forward(None, input=None)
    except TypeError as error:
        return "unexpected keyword argument 'input'" not in str(error)
    except Exception:  # None is no layer: the body was reached
        pass
    return True


def patch(modules: ModuleType, draft: Draft) -> None:
    def make(original):
        def forward(self, x=None, *, input=None):
            return original(self, x if input is None else input)

        return forward

    for name in _NAMES:
        layer = resolve(modules, name)
        if not _takes_input(layer):
            draft.wrap_plain(layer, "forward", make)
