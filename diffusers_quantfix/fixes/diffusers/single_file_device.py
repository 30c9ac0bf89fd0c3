"""``from_single_file`` loads a quantized model onto the CPU and ignores ``device_map``.

Symptom: ``from_single_file(..., quantization_config=..., device_map="cuda:1")`` silently leaves the model on the CPU
    (0.32.0-0.35.2). From 0.36.0 on ``{"": "cuda:1"}`` does the same, after allocating the model's size there, ``1``
    raises "'int' object has no attribute 'items'", and ``"cuda:1"`` raises "does not support `device_map='cuda:1'`".
Cause: ``FromOriginalModelMixin.from_single_file`` never uses ``device_map`` for the parameters. They go to
    ``torch.device(device) if device else "cpu"``, so ``device=0`` also means the CPU.
Upstream: https://github.com/huggingface/diffusers/issues/10798 requests it; there is no issue about single files.
Patch: a request for one device, by ``device_map`` or ``device``, becomes upstream's own ``device`` argument, with its
    index. Without a request a bitsandbytes model goes to the current accelerator, as with ``from_pretrained``, on
    diffusers before 0.33, and in 8-bit with a bitsandbytes without CPU support. Unquantized models, and all others
    without a request (above all GGUF), are loaded as before.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve
from ...engine.versions import is_installed

FIX = Fix(
    __doc__,
    id="diffusers-single-file-device",
    module="diffusers.loaders.single_file_model",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "accelerate": ""},
    harm="other",
    patterns=(r"'(int|torch\.device)' object has no attribute 'items'", "does not support device_map='cuda"),
    frames=("from_single_file", "single_file_model.py"),
    asked_once=True,
)


def broken(single_file_model: ModuleType) -> bool:
    """Whether the device of the parameters is still chosen without reading ``device_map``."""
    method = resolve(single_file_model, "FromOriginalModelMixin.from_single_file")
    return "param_device" in function_of(method).__code__.co_varnames


def patch(single_file_model: ModuleType, draft: Draft) -> None:
    """Wrap ``from_single_file``; it runs once per model."""

    def make(original):
        def from_single_file(cls, *args, **kwargs):
            return original(cls, *args, **_with_chosen_device(kwargs))

        return from_single_file

    draft.wrap_plain(resolve(single_file_model, "FromOriginalModelMixin"), "from_single_file", make)


def _with_chosen_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    """These arguments with ``device_map`` and ``device`` converted to the one requested ``device``."""
    config = kwargs.get("quantization_config")
    if config is None:
        return kwargs
    from diffusers_quantfix.loading.device import chosen_device, is_plan

    device_map, device = kwargs.get("device_map"), kwargs.get("device")
    if is_plan(device_map) and not is_installed("diffusers", "<0.33"):
        return kwargs  # ignored upstream: a program that passes "auto" without effect keeps working
    places = set()
    if device_map is not None:
        places.add(chosen_device(device_map, config, pre_quantized=True))
    if device is not None:
        places.add(chosen_device(device))  # upstream's own argument: for the CPU it may stay unchanged
    if len(places) > 1:
        raise ValueError(
            f"device_map={device_map!r} and device={device!r} ask for different devices: pass one of the two."
        )
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device_map", "device")}
    if places:
        kwargs["device"] = places.pop()
    elif _needs_an_accelerator(config):
        kwargs["device"] = chosen_device(None)
    return kwargs


def _needs_an_accelerator(config: Any) -> bool:
    from diffusers_quantfix.loading.device import is_bitsandbytes, quantizes_on_cpu

    return is_bitsandbytes(config) and (
        is_installed("diffusers", "<0.33") or (config.load_in_8bit and not quantizes_on_cpu())
    )
