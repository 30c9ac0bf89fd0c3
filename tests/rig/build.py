"""Compiles ``backend/`` against the installed torch, once per torch version and compiler, without importing torch.

The library names torch's libraries without a path; by the time it is loaded they are in the process. So one build
serves all virtual environments that have the same torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "backend"
FLAGS = ["-O0", "-std=c++20", "-fPIC", "-shared", "-w"]  # -O0: compile time counts, not speed
CACHE_VARIABLE = "DIFFUSERS_QUANTFIX_RIG_CACHE"


class Unavailable(Exception):
    """The rig cannot be had here; the message says why in one sentence."""


def library() -> Path:
    """The compiled backend for the installed torch, from the cache or freshly built."""
    torch_folder, torch_version = _find_torch()
    if sys.platform != "linux":
        raise Unavailable(f"the rig is built on Linux only, this is {sys.platform}")
    compiler = _find_compiler()
    target = _cache_folder() / f"{_content_key(torch_version, compiler)}.so"
    if not target.exists():
        with _lock(target.with_suffix(".lock")):
            if not target.exists():  # another process may have built it meanwhile
                _compile(compiler, torch_folder, target)
    return target


def _find_torch() -> tuple[Path, str]:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("torch is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    about = (folder / "version.py").read_text()
    if re.search(r"^(cuda|hip)\b.*=\s*['\"]", about, re.MULTILINE):
        raise Unavailable("this torch is built for real GPUs, the rig needs a CPU-only build")
    version = re.search(r"^__version__\s*=\s*['\"](.+)['\"]", about, re.MULTILINE)
    return folder, version.group(1) if version else about


def _find_compiler() -> str:
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "c++", "clang++"]:
        if path := shutil.which(name):
            return path
    raise Unavailable(f"no C++ compiler was found (looked for {asked or 'g++, c++ and clang++'})")


def _content_key(torch_version: str, compiler: str) -> str:
    asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    digest = hashlib.sha256(repr((torch_version, asked.stdout, FLAGS, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"rig-{digest.hexdigest()[:24]}"


def _cache_folder() -> Path:
    if asked := os.environ.get(CACHE_VARIABLE):
        folder = Path(asked)
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diffusers-quantfix-rig"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    folder = Path(tempfile.gettempdir()) / f"diffusers-quantfix-rig-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class _lock:
    """Holds a file lock, so that of several processes that need the same library only one compiles."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self):
        import fcntl  # POSIX only

        self.file = self.path.open("w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *exc):
        self.file.close()


def _compile(compiler: str, torch_folder: Path, target: Path) -> None:
    include, lib = torch_folder / "include", torch_folder / "lib"
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    command = [
        compiler, *FLAGS, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", str(SOURCES / "backend.cpp"),
        "-o", str(unfinished), f"-L{lib}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10",
    ]  # fmt: skip
    try:
        _run(command, "compiling the fake CUDA device failed")
        # A library that does not suit this torch may abort the process that loads it: let that be another one.
        trial = f"import torch; torch.ops.load_library({str(unfinished)!r})"
        _run([sys.executable, "-c", trial], "the fake CUDA device does not suit this torch")
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _run(command: list[str], failure: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        first = (errors or lines or [f"exit status {done.returncode}"])[0]
        raise Unavailable(f"{failure}: {first.strip()}")
