"""Compiles ``backend/`` against the installed torch, once per torch version and compiler, without importing torch.

The library names torch's libraries without a path; by the time it is loaded they are in the process. So one build
serves all virtual environments that have the same torch.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from pathlib import Path

from . import without_cuda
from .accelerator import KEY
from .toolchain import Torch, built_once, cache_folder, find_compiler, find_torch, run

SOURCES = Path(__file__).parent / "backend"
# -O0: compile time counts, not speed. NDEBUG: as torch is built, some of its classes differ without. A CUDA build of
# torch names libraries that are not loaded with the rig.
FLAGS = [
    "-O0",
    "-DNDEBUG",
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-w",
    "-Wl,--allow-shlib-undefined",
    f"-DRIG_AS={KEY}",
]


def library() -> Path:
    """The compiled backend for the installed torch, from the cache or freshly built.

    Raises:
        Unavailable: it cannot be had.
    """
    torch = find_torch()
    compiler = find_compiler()
    target = cache_folder() / f"{_content_key(torch.version, compiler)}.so"
    with built_once(target) as unfinished:
        if unfinished is not None:
            _compile(compiler, torch, unfinished)
    return target


def _content_key(torch_version: str, compiler: str) -> str:
    asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    digest = hashlib.sha256(repr((torch_version, asked.stdout, FLAGS, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"rig-{digest.hexdigest()[:24]}"


def _compile(compiler: str, torch: Torch, target: Path) -> None:
    include = torch.folder / "include"
    command = [
        compiler, *FLAGS, _strings(torch), f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
        str(SOURCES / "backend.cpp"), "-o", str(target),
        f"-L{torch.libraries}", "-ltorch_python", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    run(command, "compiling the fake CUDA device failed")
    # A library that does not suit this torch may abort the process that loads it: let that be another one.
    trial = f"import torch; torch.ops.load_library({str(target)!r})"
    if stub := without_cuda.library(torch):
        trial = f"import ctypes; ctypes.CDLL({str(stub)!r}); {trial}"
    run([sys.executable, "-c", trial], "the fake CUDA device does not suit this torch")


def _strings(torch: Torch) -> str:
    """The flag for the kind of std::string in torch's interface: its wheels before 2.7 have that of before C++11."""
    core = torch.libraries / "libc10.so"
    new = not core.exists() or b"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx11" in core.read_bytes()
    return f"-D_GLIBCXX_USE_CXX11_ABI={int(new)}"
