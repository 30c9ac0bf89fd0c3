"""AnimateDiff cannot run with quantized layers: it passes their input by keyword.

Symptom: TypeError "Linear4bit.forward() got an unexpected keyword argument 'input'" (the same with ``Linear8bitLt`` and
    ``GGUFLinear``) from every AnimateDiff pipeline whose UNet is quantized.
Cause: ``AnimateDiffTransformer3D.forward`` calls ``proj_in(input=...)`` and ``proj_out(input=...)``, as the argument is
    named in ``torch.nn.Linear``. The layers that take its place name it ``x`` or ``inputs``.
Upstream: not reported.
Patch: while the block runs, a hook of these two layers passes ``input`` by position. It is put on layers only that are
    not plain ones, and is gone afterwards, so that nothing of it is saved with a model.
"""

from __future__ import annotations

from ...engine.fix import Fix
from ...engine.probe import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

FIX = Fix(
    id="diffusers-motion-linear-input",
    title="AnimateDiff cannot run with quantized layers",
    module="diffusers.models.unets.unet_motion_model",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    upstream=(),
    symptom="TypeError: Linear4bit.forward() got an unexpected keyword argument 'input'",
    since="0.1.0",
    patterns=(r"Linear\w*\.forward\(\) got an unexpected keyword argument 'input'",),
    frames=("diffusers/models/unets/unet_motion_model.py:forward",),
    hot=True,
)

_LAYERS = ("proj_in", "proj_out")


class _Reached(Exception):
    """The layer was called, by position."""


def broken(unet_motion_model: ModuleType) -> bool:
    """Does a block on ``meta`` call a layer with a keyword that the layer does not have?"""
    import torch

    class Layer(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            raise _Reached

    block = resolve(unet_motion_model, "AnimateDiffTransformer3D")
    with torch.device("meta"):
        made = block(1, 1, in_channels=1, norm_num_groups=1)
        made.proj_in = Layer()
        try:
            made(torch.zeros(1, 1, 2, 2))
        except _Reached:
            return False
        except TypeError as error:
            return "unexpected keyword argument 'input'" in str(error)
    return False


def _by_position(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    if args or "input" not in kwargs:
        return None
    return (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}


def patch(unet_motion_model: ModuleType, draft: Draft) -> None:
    import torch

    def make(original):
        def forward(self, *args, **kwargs):
            layers = [getattr(self, name) for name in _LAYERS]
            hooks = [
                layer.register_forward_pre_hook(_by_position, with_kwargs=True)
                for layer in layers
                if type(layer) is not torch.nn.Linear
            ]
            try:
                return original(self, *args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()

        return forward

    draft.wrap_plain(resolve(unet_motion_model, "AnimateDiffTransformer3D"), "forward", make)
