"""diffusers class methods that copy the weights of one model into another and silently skip those that do not fit.

Upstream: ``from_transformer`` and ``from_unet`` of diffusers/models/controlnets (before 0.32
diffusers/models/controlnet_*.py), with ``load_state_dict(..., strict=False)``.
"""

from __future__ import annotations

import sys

from ..engine.classes import module_name
from ..engine.errors import TargetMissing
from ..engine.probe import names_used

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from ..engine.draft import Draft

__all__ = ["conversions", "guard"]

_NAMES = ("from_transformer", "from_unet")
# Home of a class of quantized layers -> quantization, if the weights have no class of their own. GGUF layers may hold
# plain weights too.
_LAYERS = {
    "diffusers.quantizers.bfl": "bfl",
    "diffusers.quantizers.nunchaku": "nunchaku",
    "sdnq": "sdnq",
    "auto_round_extension": "auto-round",
}


def conversions(module: ModuleType) -> list[tuple[type, str]]:
    """The class methods that copy weights: (class, name).

    Args:
        module: the module of the classes, or the package of their modules.

    Raises:
        TargetMissing: there is none.
    """
    home = f"{module.__name__}."
    found = [
        (value, name)
        for value in vars(module).values()
        if isinstance(value, type) and f"{module_name(value)}.".startswith(home)
        for name in _NAMES
        if isinstance(vars(value).get(name), classmethod)
        and "load_state_dict" in names_used(vars(value)[name])
    ]
    if not found:
        raise TargetMissing(f"{module.__name__} has no class with from_transformer or from_unet")
    return found


def guard(module: ModuleType, draft: Draft) -> None:
    """Make all `conversions` refuse a quantized model, and copy base layers of adapters, whose names do not match."""
    for cls, name in conversions(module):
        draft.wrap_plain(cls, name, _guarded)


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(original)
    names = list(signature.parameters)
    switch = next((name for name in names if name.startswith("load_weights_from")), None)

    def convert(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(cls, *args, **kwargs).arguments
        if switch in given and not given[switch]:
            return original(cls, *args, **kwargs)
        layers = _copied(given.get(names[1]), original)
        packages = sorted(set().union(*map(_packages, layers.values())))
        if packages:
            raise ValueError(
                f"{cls.__name__}.{original.__name__} copies weights, and those of a model that is quantized "
                f"({', '.join(packages)}) cannot be copied: pass the model before quantization, or after "
                f"`dequantize()`{f', or pass `{switch}=False`' if switch else ''}"
            )
        made = original(cls, *args, **kwargs)
        _copy_below_adapters(layers, made)
        return made

    return convert


def _copied(model: Any, method: Any) -> dict[str, Any]:
    """The layers of ``model`` that ``method`` may copy, by name: those in the submodules that it names, or all."""
    if not isinstance(model, sys.modules["torch"].nn.Module):
        return {}
    parts = model._modules.keys() & set(names_used(method))
    return {
        name: layer for name, layer in model.named_modules() if not parts or name.partition(".")[0] in parts
    }


def _packages(layer: Any) -> set[str]:
    """The backends that quantized the own weights of ``layer``."""
    from ..weights.wrappers import backend_of

    home = f"{module_name(type(layer))}."
    found = {name for place, name in _LAYERS.items() if home.startswith(f"{place}.")}
    for parameter in layer._parameters.values():
        found.add(backend_of(parameter))
    return found - {""}


def _copy_below_adapters(layers: dict[str, Any], made: Any) -> None:
    """Copy the base layer of each adapter: the weight without the adapter, unless that is fused."""
    wrapped = {name: base for name, layer in layers.items() if (base := _below_adapter(layer)) is not None}
    if not wrapped:
        return
    targets = dict(made.named_modules())
    for name, base in wrapped.items():
        if name in targets:
            targets[name].load_state_dict(base.state_dict())


def _below_adapter(layer: Any) -> Any:
    """The base layer if ``layer`` is a PEFT wrapper, else None.

    Upstream: ``BaseTunerLayer`` and ``ModulesToSaveWrapper`` of peft.
    """
    if hasattr(layer, "get_base_layer"):
        return layer.get_base_layer()
    return layer._modules.get("original_module")
