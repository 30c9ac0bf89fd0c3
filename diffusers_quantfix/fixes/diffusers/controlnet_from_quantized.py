"""A ControlNet that is made of a quantized transformer or UNet has wrong weights.

Symptom: no error, but ``from_transformer`` of a Flux, SD3, Qwen-Image or Hunyuan-DiT ControlNet gives layers with the
    bytes of an 8-bit weight for numbers (bitsandbytes, SDNQ, FP8 of Black Forest Labs), or with random numbers where
    optimum-quanto, AutoRound or Nunchaku has quantized the transformer. Of 4 bits, of torchao, or where the embedders
    are quantized too: errors about names and sizes in a state dict.
Cause: the weights are copied with ``load_state_dict(..., strict=False)``, which passes over names that do not fit, and
    writes whatever has the right shape.
Upstream: not reported.
Patch: a ValueError before anything is made. ``from_transformer`` of a Z-Image ControlNet, which shares the layers
    themselves, is left alone. So is every method that copies with ``strict=True`` outside of this package, like
    ``UNetMotionModel.from_unet2d``: PyTorch raises there, since a quantized layer has names that a plain one has not.
"""

from __future__ import annotations

import sys

from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import names_used, written_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

FIX = Fix(
    id="diffusers-controlnet-from-quantized",
    title="a ControlNet that is made of a quantized transformer has wrong weights",
    module="diffusers.models.controlnets",
    claims={"diffusers": ">=0.32.0,<=0.42.1"},
    upstream=(),
    symptom="noise from a ControlNet after from_transformer() of a quantized transformer",
    harm="wrong result",
    frames=("ControlNetModel", "from_transformer|from_unet"),
    since="0.1.0",
)

_NAMES = ("from_transformer", "from_unet")
# Where the quantized layers are defined whose weights are of no class of their own. GGUF's hold plain weights, too.
_LAYERS = {
    "diffusers.quantizers.bfl": "bfl",
    "diffusers.quantizers.nunchaku": "nunchaku",
    "sdnq": "sdnq",
    "auto_round_extension": "auto-round",
}


def broken(controlnets: ModuleType) -> bool:
    """Is there one that copies weights, with nothing of ours around it?"""
    return any(not written_in(vars(cls)[name].__func__, __file__) for cls, name in _conversions(controlnets))


def patch(controlnets: ModuleType, draft: Draft) -> None:
    import inspect

    def make(original):
        signature = inspect.signature(original)

        def convert(cls, *args, **kwargs):
            given = signature.bind(cls, *args, **kwargs).arguments
            copied = [name for name in given if name.startswith("load_weights_from")]
            if all(given[name] for name in copied):
                refuse_quantized(cls, original, list(signature.parameters), given)
            return original(cls, *args, **kwargs)

        return convert

    def refuse_quantized(cls, original, names, given):
        source, method = given.get(names[1]), original.__name__
        packages = sorted(set().union(*map(_packages, _copied(source, original))))
        if packages:
            without = next((name for name in names if name.startswith("load_weights_from")), None)
            raise ValueError(
                f"{cls.__name__}.{method} copies weights, and those of a model that is quantized "
                f"({', '.join(packages)}) cannot be copied: give it the model as it was before, or after "
                f"`dequantize()`{f', or pass `{without}=False`' if without else ''}"
            )

    for cls, name in _conversions(controlnets):
        draft.wrap_plain(cls, name, make)


def _copied(model: Any, method: Any) -> list[Any]:
    """The layers of ``model`` that ``method`` may copy: those of the parts that it names, else all of them."""
    if not isinstance(model, sys.modules["torch"].nn.Module):
        return []
    parts = model._modules.keys() & set(names_used(method))
    return [layer for name, layer in model.named_modules() if not parts or name.partition(".")[0] in parts]


def _packages(layer: Any) -> set[str]:
    """What has quantized the weights of ``layer`` itself."""
    from ...weights.wrappers import backend_of

    home = f"{type(layer).__module__}."
    found = {name for place, name in _LAYERS.items() if home.startswith(f"{place}.")}
    for parameter in layer._parameters.values():
        found.add("gguf" if type(parameter).__name__ == "GGUFParameter" else backend_of(parameter))
    return found - {""}


def _conversions(controlnets: ModuleType) -> list[tuple[type, str]]:
    """The class methods that copy weights, each with its class."""
    found = [
        (value, name)
        for value in vars(controlnets).values()
        if isinstance(value, type)
        for name in _NAMES
        if isinstance(vars(value).get(name), classmethod)
        and "load_state_dict" in names_used(vars(value)[name])
    ]
    if not found:
        raise TargetMissing(f"{controlnets.__name__} has no class with from_transformer or from_unet")
    return found
