"""A 4-bit text encoder is moved; its hooks must send the inputs to the new device."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    from ..models import four_bit

    model = four_bit.text_encoder(work, cuda())
    model.to("cpu")
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    places = {str(hook.execution_device) for hook in hooks}
    assert places <= {"cpu"}, f"the model is on the CPU, its hooks send the inputs to {places}"
    return "the hooks send the inputs to the CPU, where the model is"
