"""Hardware limits for quantized models on this machine: sentences for `doctor`.

Advice is given only where it applies, and says what to do.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys

from ..engine.versions import installed_version
from ..loading.device import accelerator_types
from . import quantizers, quanto, supported
from .combinations import LIBSTDCXX
from .ranges import fits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..engine.board import Board


def accelerator() -> tuple[str, str]:
    """("cuda", "xpu", "mps", another kind or ""; a sentence that says what torch sees)."""
    if installed_version("torch") is None:
        return "", "torch is not installed"
    try:
        import torch

        for kind in accelerator_types():
            backend = getattr(torch, kind)
            count = backend.device_count()
            name = getattr(backend, "get_device_name", None)  # mps has none
            names = sorted({name(i) for i in range(count)}) if name else ()
            return kind, f"{count} x {kind}" + (f" ({', '.join(names)})" if names else "")
        return "", "none: torch runs on the CPU"
    except Exception as error:
        return "", f"torch cannot say: {error}"


def covers(claims: Mapping[str, str]) -> bool:
    """Whether a bad combination depends on this machine, so that `advice` reports it."""
    return list(claims) == ["bitsandbytes"]


def advice(board: Board, kind: str) -> list[str]:
    """What a user of this machine should know, as sentences.

    Args:
        board: what is installed and patched.
        kind: the accelerator that torch sees, "" for none.
    """
    versions = {name: version for name, version in board.installed.items() if version}
    applied = {answer.id for answer in board if answer.state == "applied"}
    python = supported.outside("Python", platform.python_version(), supported.PYTHON)
    sentences = [*filter(None, [python]), *_torch(versions, kind), *_native_library(versions, kind)]
    if "bitsandbytes" in versions:
        sentences += _bitsandbytes(versions, kind)
    if "diffusers" in versions and "bitsandbytes" in versions:
        sentences += _diffusers(versions, kind, applied)
    return [*sentences, *quanto.advice(versions, kind), *quantizers.advice()]


def _torch(versions: dict[str, str], kind: str) -> Iterator[str]:
    torch = versions.get("torch")
    if torch is not None and (said := supported.outside("torch", torch, supported.TORCH)):
        yield said
    if torch is None or kind or sys.platform == "darwin":
        return
    if shutil.which("nvidia-smi") and not _torch_is_for_gpus():
        yield (
            f"torch {torch} is built without CUDA, and this machine has an NVIDIA driver: install a CUDA build "
            "(https://pytorch.org/get-started/locally); the one that pip finds for Windows has none"
        )
    elif sys.platform == "win32" and not _torch_is_for_gpus():
        yield "pip finds a torch without CUDA for Windows; for a GPU see https://pytorch.org/get-started/locally"


def _bitsandbytes(versions: dict[str, str], kind: str) -> Iterator[str]:
    version = versions["bitsandbytes"]

    def is_(specifier: str) -> bool:
        return fits(specifier, version)

    if not kind and is_("<0.46"):
        yield f"bitsandbytes {version} quantizes on a GPU only; 0.46 and newer do so on a CPU too"
    if kind == "xpu" and is_("<0.48"):
        yield f"bitsandbytes {version} has no official support for Intel GPUs; 0.48 and newer have"
    if sys.platform == "darwin" and is_("<0.49"):
        yield f"bitsandbytes {version} has no wheel for macOS; 0.49 and newer have one for macOS 14 on Apple silicon"


def _diffusers(versions: dict[str, str], kind: str, applied: set[str]) -> Iterator[str]:
    version = versions["diffusers"]
    refused = "No GPU found. A GPU is needed for quantization."
    if "diffusers-cpu-only" in applied:
        return
    if not kind:
        yield (
            f"diffusers {version} refuses bitsandbytes without a GPU ({refused!r}); text encoders of transformers load "
            "on a CPU from bitsandbytes 0.46 on"
        )
    elif kind == "xpu" and fits("<0.32", version):
        yield f"diffusers {version} refuses bitsandbytes on Intel GPUs ({refused!r}); use 0.33 or newer"
    elif kind == "mps" and fits("<0.39", version):
        yield f"diffusers {version} refuses bitsandbytes on Apple silicon ({refused!r}); use 0.39 or newer"


def _native_library(versions: dict[str, str], kind: str) -> Iterator[str]:
    """bitsandbytes imports without its native library, and fails at the first use."""
    if "bitsandbytes" not in versions:
        return
    extension = sys.modules.get("bitsandbytes.cextension")  # the board has tried to import it
    library = getattr(extension, "lib", None)
    if extension is None:
        return
    version = versions["bitsandbytes"]
    if kind == "cuda" and not getattr(library, "compiled_with_cuda", False):
        yield (
            f"bitsandbytes {version} has no native library for the CUDA of this torch: every 4-bit and 8-bit model "
            "fails at its first use; `python -m bitsandbytes` says which one it looks for"
        )
    elif library is None and not kind and fits(">=0.45.1,<=0.45.3", version) and not _has_libstdcxx():
        yield f"the native library of bitsandbytes {version} could not be loaded: it needs {LIBSTDCXX} (GCC 13)"


def _has_libstdcxx() -> bool:
    """Whether this process's libstdc++ is new enough; True if that cannot be determined."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            loaded = {line.split()[-1] for line in maps if "libstdc++.so" in line}
        return any(LIBSTDCXX.encode() in _bytes(path) for path in loaded) if loaded else True
    except OSError:
        return True


def _bytes(path: str) -> bytes:
    with open(os.path.realpath(path), "rb") as file:
        return file.read()


def _torch_is_for_gpus() -> bool:
    """Whether torch was built for CUDA or ROCm."""
    try:
        import torch

        return bool(torch.version.cuda or torch.version.hip)
    except Exception:
        return True


def machine() -> str:
    """The Python and the platform, as a sentence."""
    return f"Python {platform.python_version()}, {platform.platform()}"
