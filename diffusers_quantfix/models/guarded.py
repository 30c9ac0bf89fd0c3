"""The guards in the ``to`` of pipelines: which calls they are for, and whether they accept a component.

Upstream: diffusers/pipelines/pipeline_utils.py (``DiffusionPipeline.to``),
diffusers/modular_pipelines/modular_pipeline.py (``ModularPipeline.to``).
"""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

from ..engine.errors import TargetMissing
from ..engine.probe import function_of, resolve
from ..offloading.hooks import align_hooks, is_spread, offloaded_stand_in
from .eight_bit import asked_device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


_GUARDED = ("cuda", "xpu")  # as upstream
OFFLOADED = "you have activated sequential model offloading"


def guarded_device(pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The device to which ``pipe.to(*args, **kwargs)`` moves, if upstream guards it; else None.

    None for a pipeline with a device map of several devices too: upstream raises its own error.
    """
    device = asked_device(args, kwargs)
    if device is None or device.type not in _GUARDED or _is_device_mapped(pipe):
        return None
    return device


def _is_device_mapped(pipe: Any) -> bool:
    """As upstream asks it; a map with the name of one device is none."""
    places = getattr(pipe, "hf_device_map", None)
    if places is None:
        return False
    asked = getattr(pipe, "_is_pipeline_device_mapped", None)
    return bool(asked()) if asked is not None else len(places) > 1


def moved_with_bnb(components: dict[str, Any], status: Callable[[Any], Any], stays: bool) -> dict[str, Any]:
    """The components that ``to`` moves, by name, where one of them turns upstream's guard off; else none.

    Args:
        components: of the pipeline.
        status: upstream's ``_check_bnb_status``: whether a component is one of bitsandbytes, in 4 bits, in 8 bits.
        stays: whether ``to`` leaves those in 8 bits where they are.
    """
    kinds = {name: status(component) for name, component in components.items()}
    if not any(map(any, kinds.values())):
        return {}
    return {name: component for name, component in components.items() if not (stays and kinds[name][2])}


def gets_past_the_guard(pipeline_class: Any, component: Any) -> bool:
    """Call ``to("cuda")`` of a pipeline with this one component, up to the end of the guards; nothing is moved.

    Returns:
        False if ``to`` returns before it reaches the components.

    Raises:
        ValueError: raised by a guard.
    """

    class Unguarded(Exception):
        pass

    class Pipeline:
        hf_device_map = None

        def __init__(self) -> None:
            self.components = {"component": component}

        def _is_pipeline_device_mapped(self) -> bool:
            return False

        def _get_signature_keys(self, obj: Any) -> None:
            raise Unguarded

        def _maybe_raise_error_if_group_offload_active(self, **asked: Any) -> None:
            raise Unguarded

    try:
        pipeline_class.to(Pipeline(), "cuda")
    except Unguarded:
        return True
    return False


def offload_refusal(pipeline_class: Any) -> str:
    """Upstream's error message for moving a sequentially offloaded pipeline to a GPU.

    Raises:
        TargetMissing: there is none.
    """
    for constant in function_of(resolve(pipeline_class, "to")).__code__.co_consts:
        if isinstance(constant, str) and OFFLOADED in constant:
            return constant
    raise TargetMissing(f"{pipeline_class.__name__}.to has no guard against sequential offload")


def refuse_spread(name: str, component: Any, device: Any) -> None:
    """Refuse to move a component that is spread over several devices, as a ValueError that names it."""
    # Without such a hook the map is what is left of one that was undone.
    if not is_spread(component) or not any(True for _ in align_hooks(component)):
        return
    if not is_spread(_map_of_weights(component)):
        return
    listed = ", ".join(sorted(set(map(str, component.hf_device_map.values()))))
    raise ValueError(
        f"{name} ({type(component).__name__}) is spread over several devices by its device_map ({listed}), so the"
        f" pipeline cannot be moved to {device}. Load {name} onto one device, for example with"
        f' device_map={{"": "{device}"}}, or move the other components one by one and leave {name} where it is.'
    )


def _map_of_weights(component: Any) -> Any:
    """Something with the ``device_map`` of ``component`` without the parts that have no weights and no buffers."""

    def weighs(name: str) -> bool:
        try:
            part = component.get_submodule(name)
        except AttributeError:  # the name of a weight
            return True
        return any(True for _ in itertools.chain(part.parameters(), part.buffers()))

    places = component.hf_device_map.items()
    return SimpleNamespace(hf_device_map={name: place for name, place in places if weighs(name)})


def spread_4bit_model() -> Any:
    """A module without weights whose hook only moves inputs, as accelerate's do if nothing is offloaded; None without
    accelerate's hooks."""
    hooks: Any = sys.modules.get("accelerate.hooks")
    if not hasattr(hooks, "AlignDevicesHook"):
        return None
    import torch

    component: Any = torch.nn.Module()
    component._hf_hook = hooks.AlignDevicesHook(io_same_device=True)
    component.hf_device_map = {"one": 0, "two": 1}
    return mark_as_4bit(component)


def offloaded_4bit_model() -> Any:
    """A module without weights that is 4-bit and sequentially offloaded; None without accelerate's hooks."""
    import torch

    component = offloaded_stand_in(torch.nn.Module)
    return None if component is None else mark_as_4bit(component)


def mark_as_4bit(component: Any) -> Any:
    """Set the attributes by which diffusers and transformers recognize a 4-bit bitsandbytes model."""
    from diffusers.quantizers.quantization_config import QuantizationMethod

    component.is_quantized = component.is_loaded_in_4bit = True
    component.is_loaded_in_8bit = False
    component.quantization_method = QuantizationMethod.BITS_AND_BYTES
    return component
