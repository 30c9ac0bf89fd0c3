"""The guards in ``DiffusionPipeline.to``: which calls they are for, and whether they accept a component.

Upstream: diffusers/pipelines/pipeline_utils.py (``DiffusionPipeline.to``).
"""

from __future__ import annotations

from .eight_bit import asked_device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_GUARDED = ("cuda", "xpu")  # as upstream


def guarded_device(pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The device to which ``pipe.to(*args, **kwargs)`` moves, if upstream guards it; else None.

    None for a pipeline with a device map too: upstream raises its own error.
    """
    device = asked_device(args, kwargs)
    if device is None or device.type not in _GUARDED or getattr(pipe, "hf_device_map", None) is not None:
        return None
    return device


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

    try:
        pipeline_class.to(Pipeline(), "cuda")
    except Unguarded:
        return True
    return False


def mark_as_4bit(component: Any) -> Any:
    """Set the attributes by which diffusers and transformers recognize a 4-bit bitsandbytes model."""
    from diffusers.quantizers.quantization_config import QuantizationMethod

    component.is_quantized = component.is_loaded_in_4bit = True
    component.is_loaded_in_8bit = False
    component.quantization_method = QuantizationMethod.BITS_AND_BYTES
    return component
