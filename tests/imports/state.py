"""All state of a process that an import may change: one function per kind, which returns a value to compare."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

KINDS: dict[str, Callable[[], Any]] = {}


def kind(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(look: Callable[[], Any]) -> Callable[[], Any]:
        KINDS[name] = look
        return look

    return add


def _torch(name: str, look: Callable[[Any], Any]) -> None:
    def looked() -> Any:
        torch = sys.modules.get("torch")
        if torch is None or getattr(torch.__spec__, "_initializing", False):
            return None
        return look(torch)

    KINDS[name] = looked


KINDS |= {
    "collector enabled": gc.isenabled,
    "collector thresholds": gc.get_threshold,
    "collector's frozen objects": gc.get_freeze_count,
    "collector's callbacks": lambda: len(gc.callbacks),
    "collector's debug flags": gc.get_debug,
    "switch interval": sys.getswitchinterval,
    "recursion limit": sys.getrecursionlimit,
    "trace function": sys.gettrace,
    "profile function": sys.getprofile,
    "sys.path": lambda: list(sys.path),
    "path hooks": lambda: [id(hook) for hook in sys.path_hooks],
    "environment": lambda: dict(os.environ),
    "folder": os.getcwd,
    "file mode mask": lambda: _status("Umask"),
    "signals caught": lambda: _status("SigCgt"),
    "standard streams": lambda: [id(sys.stdin), id(sys.stdout), id(sys.stderr)],
    "sys.excepthook": lambda: id(sys.excepthook),
    "sys.displayhook": lambda: id(sys.displayhook),
    "warnings filters": lambda: list(warnings.filters),
    "warnings.showwarning": lambda: id(warnings.showwarning),
    "threads": lambda: _status("Threads"),
    "open files": lambda: len(os.listdir("/proc/self/fd")),
}


def _status(field: str) -> str:
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(field + ":"))


@kind("random numbers of Python")
def _python_random() -> Any:
    random = sys.modules.get("random")
    return hash(random.getstate()) if hasattr(random, "getstate") else None


@kind("random numbers of numpy")
def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy.random")
    return str(numpy.get_state()[1:]) if hasattr(numpy, "get_state") else None


@kind("loggers")
def _loggers() -> Any:
    """Levels, filters and handlers of all loggers but the package's own."""
    logging = sys.modules.get("logging")
    if not hasattr(logging, "root"):
        return None
    loggers = {"root": logging.root, **logging.root.manager.loggerDict.copy()}
    return {
        name: (one.level, list(one.filters), list(one.handlers), one.propagate, one.disabled)
        for name, one in loggers.items()
        if hasattr(one, "filters") and not name.startswith("diffusers_quantfix")
    }


@kind("logging.disable")
def _disabled() -> Any:
    logging = sys.modules.get("logging")
    return logging.root.manager.disable if hasattr(logging, "root") else None


_torch("default dtype", lambda torch: torch.get_default_dtype())
_torch("dtype of a new tensor", lambda torch: torch.zeros(1).dtype)
_torch("device of a new tensor", lambda torch: torch.zeros(1).device)
_torch("gradients of a new tensor", lambda torch: torch.zeros(1, requires_grad=True).mul(2).requires_grad)
_torch("inference mode", lambda torch: torch.is_inference_mode_enabled())
_torch(
    "torch.utils._device.CURRENT_DEVICE",
    lambda torch: getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None),
)
_torch("random numbers of torch", lambda torch: torch.default_generator.get_state().tolist())
_torch("initial seed of torch", lambda torch: torch.initial_seed())
_torch("deterministic algorithms", lambda torch: torch.are_deterministic_algorithms_enabled())
_torch("deterministic, warnings only", lambda torch: torch.is_deterministic_algorithms_warn_only_enabled())
_torch("filling uninitialized memory", lambda torch: torch.utils.deterministic.fill_uninitialized_memory)
_torch("threads of torch", lambda torch: torch.get_num_threads())
_torch("interop threads of torch", lambda torch: torch.get_num_interop_threads())
_torch("precision of matmul", lambda torch: torch.get_float32_matmul_precision())
_torch("autocast", lambda torch: (torch.is_autocast_enabled(), torch.is_autocast_cache_enabled()))
_torch("anomaly detection", lambda torch: torch.is_anomaly_enabled())
_torch("warn always", lambda torch: torch.is_warn_always_enabled())
_torch("CUDA initialized", lambda torch: torch.cuda.is_initialized())
_torch("global hooks of modules", lambda torch: len(torch.nn.modules.module._global_forward_hooks))
_torch("printing", lambda torch: vars(torch._tensor_str.PRINT_OPTS).copy())
_torch("cudnn", lambda torch: (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark))
_torch("mkldnn", lambda torch: torch.backends.mkldnn.enabled)


def everything() -> dict[str, Any]:
    return {name: look() for name, look in KINDS.items()}
