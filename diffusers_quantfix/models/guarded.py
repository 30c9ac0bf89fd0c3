"""Whether the guards in ``DiffusionPipeline.to`` accept a component; for the probes of their fixes.

Upstream: diffusers/pipelines/pipeline_utils.py (``DiffusionPipeline.to``).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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
