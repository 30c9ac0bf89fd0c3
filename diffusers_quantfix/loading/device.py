"""The one device onto which a quantized model is loaded.

Shared by the fixes of the loading paths: which device a ``device_map`` requests, whether this machine has it, and the
default device. Every error is raised before anything is allocated, and its message ends with the next step. torch is
imported inside the functions.
"""

from __future__ import annotations

from ..weights.method import method_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch

__all__ = [
    "accelerator_types",
    "chosen_device",
    "current_accelerator",
    "is_bitsandbytes",
    "is_plan",
    "quantizes_on_cpu",
]

_PLANS = ("auto", "balanced", "balanced_low_0", "sequential")


def chosen_device(device_map: Any, config: Any = None, pre_quantized: bool = False) -> torch.device:
    """The device onto which a quantized model must be loaded.

    Args:
        device_map: the argument of ``from_pretrained``: None, a device, its name or index, or a dictionary whose values
            all name the same device.
        config: the quantization config, if the device must support this quantization.
        pre_quantized: whether the checkpoint is quantized already.

    Returns:
        A ``torch.device`` that this machine has, with its index (the CPU has none). For None, the current device of the
        accelerator.

    Raises:
        NotImplementedError: ``device_map`` is a plan over several devices, or includes "disk".
        ValueError: it names no device, a device that this machine lacks, or the CPU with a bitsandbytes that cannot
            quantize there.
    """
    if device_map is None:
        return current_accelerator()
    if is_plan(device_map):
        raise NotImplementedError(  # as these releases of diffusers raise for any device_map
            f"diffusers {_version('diffusers')} can load a quantized model onto one device only, and"
            f" device_map={_readable(device_map)} is a plan over several: pass one device such as"
            f" {str(current_accelerator())!r}, or upgrade to diffusers>=0.33 and use from_pretrained."
        )
    if isinstance(device_map, dict):
        (device_map,) = {str(value): value for value in device_map.values()}.values()
    device = _existing(device_map)
    if device.type == "cpu" and not _can_load_on_cpu(config, pre_quantized):
        raise ValueError(
            f"bitsandbytes {_version('bitsandbytes')} has no CPU support: pass an accelerator such as"
            f" {str(current_accelerator())!r} as device_map, or upgrade to bitsandbytes>=0.46."
        )
    return device


def accelerator_types() -> list[str]:
    """The types of accelerator that torch sees here, the preferred one first; ROCm devices are called cuda.

    Third-party backends (Ascend's npu, Gaudi's hpu) register as torch's accelerator, which torch reports since 2.6.
    """
    import torch

    named = {"cuda": torch.cuda, "xpu": getattr(torch, "xpu", None), "mps": torch.backends.mps}
    found = [kind for kind, module in named.items() if module is not None and module.is_available()]
    accelerator = getattr(torch, "accelerator", None)
    if not found and accelerator is not None and accelerator.is_available():
        found.append(accelerator.current_accelerator().type)
    return found


def current_accelerator() -> torch.device:
    """The current device of the preferred accelerator, with its index; the CPU if there is none."""
    import torch

    for kind in accelerator_types():
        module: Any = getattr(torch, kind, None)
        return torch.device(kind, module.current_device() if hasattr(module, "current_device") else 0)
    return torch.device("cpu")


def is_plan(device_map: Any) -> bool:
    """Whether a ``device_map`` is a plan over several devices rather than a request for one."""
    if isinstance(device_map, dict):
        places = {str(value) for value in device_map.values()}
        return len(places) != 1 or places == {"disk"}
    return isinstance(device_map, str) and device_map in _PLANS


def quantizes_on_cpu() -> bool:
    """Whether the installed bitsandbytes can quantize on the CPU; before 0.46 it leaves the weights as they are."""
    from ..engine.versions import is_installed  # not at the top: it loads importlib.metadata

    return is_installed("bitsandbytes", ">=0.46")


def is_bitsandbytes(config: Any) -> bool:
    """Whether a quantization config of diffusers or transformers is one for bitsandbytes."""
    return method_of(config) == "bitsandbytes"


def _can_load_on_cpu(config: Any, pre_quantized: bool) -> bool:
    if not is_bitsandbytes(config) or quantizes_on_cpu():
        return True
    # A 4-bit checkpoint is only copied; an 8-bit one would be quantized again by its first move.
    return pre_quantized and bool(getattr(config, "load_in_4bit", False))


def _existing(request: Any) -> torch.device:
    """The device that ``request`` names, with its index.

    Raises:
        ValueError: it names no device, or one that this machine lacks.
    """
    import torch

    here = current_accelerator()
    try:
        if isinstance(
            request, int
        ):  # an index among the accelerators; torch.device(1) may mean "cuda" without any
            request = f"{'cuda' if here.type == 'cpu' else here.type}:{request}"
        device = torch.device(request)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device_map={_readable(request)} names no device: pass one such as {str(here)!r}."
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")
    there = _count(device.type)
    if (device.index or 0) >= there:
        have = ", ".join(f"{here.type}:{i}" for i in range(_count(here.type)))
        raise ValueError(
            f"device_map asks for {device}, and this machine has {have or 'the CPU only'}: pass an"
            f" existing device, or omit device_map to use {here}."
        )
    if device.index is None:
        return here if here.type == device.type else torch.device(device.type, 0)
    return device


def _count(kind: str) -> int:
    """The number of devices of a type."""
    import torch

    if kind == "mps":
        return int(torch.backends.mps.is_available())
    if kind in ("cpu", "meta"):
        return 0  # neither has an index, and a model without weights is not loaded
    module = getattr(torch, kind, None)
    if module is None or not hasattr(module, "device_count") or not module.is_available():
        return 0
    return int(module.device_count())


def _readable(device_map: Any) -> str:
    if isinstance(device_map, dict):
        return "{" + ", ".join(f"{key!r}: {str(value)!r}" for key, value in device_map.items()) + "}"
    return repr(str(device_map))


def _version(distribution: str) -> str:
    from ..engine.versions import installed_version  # not at the top: it loads importlib.metadata

    return installed_version(distribution) or ""
