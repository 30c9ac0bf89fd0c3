"""How far ``DiffusionPipeline.to`` lets a component come: for the probes of the guards in it.

Upstream: diffusers/pipelines/pipeline_utils.py (``DiffusionPipeline.to``).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def gets_past_the_guard(pipeline_class: Any, component: Any) -> bool:
    """Send a pipeline with this one component to "cuda", as far as the guard; nothing is moved.

    Returns:
        False where the move ends before the components are reached.

    Raises:
        ValueError: what the guard raises.
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
    """Give a module what diffusers and transformers look for in a model that bitsandbytes has in 4 bits."""
    from diffusers.quantizers.quantization_config import QuantizationMethod

    component.is_quantized = component.is_loaded_in_4bit = True
    component.is_loaded_in_8bit = False
    component.quantization_method = QuantizationMethod.BITS_AND_BYTES
    return component
