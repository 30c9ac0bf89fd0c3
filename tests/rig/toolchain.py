"""What the rig is built with: the installed torch, a C++ compiler, a cache folder. Does not import torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "DIFFUSERS_QUANTFIX_RIG_CACHE"


class Unavailable(Exception):
    """The rig cannot be had here; the message says why in one sentence."""


@dataclass(frozen=True)
class Torch:
    """The installed torch, as its files say.

    Attributes:
        folder: of the package.
        version: "2.13.0+cpu".
        accelerator: "cuda" or "hip" for a build for these, else empty.
    """

    folder: Path
    version: str
    accelerator: str = ""

    @property
    def libraries(self) -> Path:
        return self.folder / "lib"


def find_torch() -> Torch:
    """The torch that this interpreter would import.

    Raises:
        Unavailable: there is none, or none that the rig can be built for.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("torch is not installed")
    if sys.platform != "linux":
        raise Unavailable(f"the rig is built on Linux only, this is {sys.platform}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    about = (folder / "version.py").read_text()
    version = re.search(r"^__version__\s*=\s*['\"](.+)['\"]", about, re.MULTILINE)
    kind = re.search(r"^(cuda|hip)\b.*=\s*['\"]", about, re.MULTILINE)
    return Torch(folder, version.group(1) if version else about, kind.group(1) if kind else "")


def find_compiler() -> str:
    """The C++ compiler, ``$CXX`` first.

    Raises:
        Unavailable: there is none.
    """
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "c++", "clang++"]:
        if path := shutil.which(name):
            return path
    raise Unavailable(f"no C++ compiler was found (looked for {asked or 'g++, c++ and clang++'})")


def cache_folder() -> Path:
    """Where built libraries are kept: ``$DIFFUSERS_QUANTFIX_RIG_CACHE``, the user's cache, or a temporary folder."""
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


@contextlib.contextmanager
def built_once(target: Path) -> Iterator[Path | None]:
    """Give the path to build ``target`` at, or None where it is there; of several processes only one builds it."""
    if target.exists():
        yield None
        return
    import fcntl  # POSIX only

    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():  # another process has built it meanwhile
            yield None
            return
        unfinished = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            yield unfinished
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)


def run(command: list[str], failure: str, stdin: str = "") -> str:
    """The standard output of a command.

    Raises:
        Unavailable: it cannot be run or fails; the message begins with ``failure`` and quotes its first complaint.
    """
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"{failure}: {error}") from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        first = (errors or lines or [f"exit status {done.returncode}"])[0]
        raise Unavailable(f"{failure}: {first.strip()}")
    return done.stdout
