"""Where accelerate's hooks move the inputs of a model."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def execution_devices(model: Any) -> dict[str, str]:
    """Name of each module with a hook -> the device to which it moves inputs."""
    return {
        name: str(module._hf_hook.execution_device)
        for name, module in model.named_modules()
        if hasattr(module, "_hf_hook")
    }


def move_to_cpu(model: Any) -> str:
    """Move ``model``; its hooks must send the inputs there, too."""
    model.to("cpu")
    places = set(execution_devices(model).values())
    assert places <= {"cpu"}, f"the model is on the CPU, its hooks send the inputs to {places}"
    return "the hooks send the inputs to the CPU, where the model is"
