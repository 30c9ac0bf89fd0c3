"""Casting a pipeline with quantized components, for both kinds of diffusers pipelines.

``pipe.to(dtype)`` casts one component after the other. Upstream lets only bitsandbytes components keep their dtype; any
other quantized model raises midway, or is partially cast. Here every quantized component is moved with the pipeline and
keeps its dtype, with upstream's warning.

Upstream: diffusers/pipelines/pipeline_utils.py, diffusers/modular_pipelines/modular_pipeline.py.
"""

from __future__ import annotations

import sys

from ..engine.task_value import TaskValue
from ..weights.method import method_of
from . import eight_bit

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Callable
    from typing import Any

__all__ = [
    "asked_dtype",
    "is_casting",
    "is_quantized",
    "model_classes",
    "passes_on_the_cast",
    "sparing",
    "sparing_models",
]

# Whether a pipeline that holds quantized components is being cast, in this thread or task.
_casting = TaskValue(__name__, "_casting", default=False)


def is_casting() -> bool:
    """Whether this thread or task is casting a pipeline without its quantized components."""
    return bool(_casting.get())


def is_quantized(component: Any) -> bool:
    """Whether a component, which may be any object, is a model that diffusers or transformers quantized."""
    import torch

    return isinstance(component, torch.nn.Module) and bool(getattr(component, "is_quantized", False))


def asked_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The ``torch.dtype`` in the arguments of ``.to()`` of a pipeline or model; None if there is none."""
    import torch

    named = kwargs.get("dtype")
    return (
        named
        if named is not None
        else next((value for value in args if isinstance(value, torch.dtype)), None)
    )


def sparing(original: Callable[..., Any], logger: logging.Logger) -> Callable[..., Any]:
    """Wrap ``to`` of a pipeline class, which logs to ``logger``, so that quantized components keep their dtype."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = asked_dtype(args, kwargs)
        spared = [] if dtype is None else [part for part in self.components.values() if _keeps_dtype(part)]
        if not spared:
            return original(self, *args, **kwargs)
        token = _casting.set(True)
        try:
            result = original(self, *args, **kwargs)
        finally:
            _casting.reset(token)
        for part in spared:
            if method_of(part) != "bitsandbytes":  # for which upstream warns
                logger.warning(
                    f"The module '{type(part).__name__}' has been loaded with `{method_of(part)}` and conversion to"
                    f" {dtype} is not supported. Module is still in its own precision. If a run ends with an error"
                    f" about dtypes, load the module with `torch_dtype={dtype}`."
                )
        return result

    return to


def sparing_models(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``to`` of a model class so that a quantized model ignores the dtype while its pipeline is cast."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _casting.get() or not _keeps_dtype(self):
            return original(self, *args, **kwargs)
        device = eight_bit.asked_device(args, kwargs)
        return self if device is None else original(self, device)

    return to


def model_classes() -> list[Any]:
    """The base classes of models whose ``to`` casts a component: diffusers', and transformers' if it is imported.

    transformers is not imported for this: that takes seconds, and a pipeline without a transformers model does not need
    it. diffusers imports it before its pipelines.
    """
    homes = (
        ("diffusers.models.modeling_utils", "ModelMixin"),
        ("transformers.modeling_utils", "PreTrainedModel"),
    )
    found = (getattr(sys.modules.get(module), name, None) for module, name in homes)
    return [model for model in found if model is not None]


def passes_on_the_cast(pipeline_class: Any) -> bool:
    """Whether ``pipeline_class.to(dtype)`` casts a quantized component."""
    import torch

    told = []

    def component_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        told.append(asked_dtype(args, kwargs))
        return self

    # Where `sparing` is in place already, as after a reload of the models, it logs nothing about this method.
    method = "bitsandbytes"
    facts = {"is_quantized": True, "quantization_method": method, "dtype": torch.float32, "to": component_to}
    component = type("Component", (torch.nn.Module,), facts)()

    class Pipeline:
        hf_device_map = None
        transformer = component
        components = {"transformer": component}  # noqa: RUF012

        def _is_pipeline_device_mapped(self) -> bool:
            return False

        def _maybe_raise_error_if_group_offload_active(self, *_: Any, **__: Any) -> bool:
            return False

        def _get_signature_keys(self, _: Any) -> tuple[list[str], list[str]]:
            return ["transformer"], []

    pipeline_class.to(Pipeline(), dtype=torch.float16)
    return torch.float16 in told


def _keeps_dtype(component: Any) -> bool:
    # For HQQ a cast changes the compute dtype, which its models in transformers support.
    return is_quantized(component) and method_of(component) != "hqq"
