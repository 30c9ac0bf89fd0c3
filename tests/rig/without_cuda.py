"""Makes a CUDA build of torch behave like a CPU-only one: an empty library in place of ``libtorch_cuda.so``.

The loader takes a library that is in the process already for any other of the same SONAME. So an empty
``libtorch_cuda.so``, loaded before torch is imported, keeps the real one out, and with it all its kernels and hooks,
whose place the rig takes. What ``libtorch_python.so`` and torchvision need from it by name is there, and raises when it
is called after `arm`. Nothing on disk is changed.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from .toolchain import Torch, Unavailable, built_once, cache_folder, find_compiler, find_torch, run

_REPLACED = "libtorch_cuda.so"
# torch 2.15 has Python kernels in front of those of CUDA, which it asks for while it is imported; this is its own way
# to leave them out: the path of a function.
_PYTHON_KERNELS = "TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN"
_BROUGHT = "libtorch_nvshmem.so"  # what it alone brings into the process, since torch 2.9
_HEAD = """\
#include <stdexcept>
#include <string>
static char scratch[1 << 16];
static bool armed = false;
extern "C" void rig_arm() { armed = true; }
static void* missing(const char* name) {
  if (armed) throw std::runtime_error(std::string("the rig keeps CUDA's own code out, which has ") + name);
  return scratch;  // some are called while libtorch_python.so is loaded, to register something
}
extern "C" char _ZTVN10__cxxabiv117__class_type_infoE[];
struct TypeInfo { const void* table; const char* name; const void* base; };
static void* nothing() { return nullptr; }
struct Table {  // of virtual functions: typeid and dynamic_cast read the first two members
  long top = 0;
  const TypeInfo* type;
  void* (*functions[64])();
  explicit Table(const TypeInfo* of) : type(of) { for (auto& function : functions) function = nothing; }
};
"""
_CONSTRUCTOR = re.compile(r"_ZN(\w+?)C[12]E")


@functools.cache
def keep_out() -> ctypes.CDLL | None:
    """Load the empty library, before torch is imported; None for a torch that has no code for CUDA.

    Raises:
        Unavailable: torch is imported already, there is a real GPU, or the empty library cannot be built.
    """
    torch = find_torch()
    if torch.accelerator == "hip":
        raise Unavailable(
            "this torch is built for AMD's GPUs, the rig needs a build for CUDA or for the CPU only"
        )
    if not (torch.libraries / _REPLACED).exists():
        return None
    if glob.glob("/dev/nvidia[0-9]*"):
        raise Unavailable("this torch is built for CUDA and the machine has a GPU, whose code stays in place")
    if "torch" in sys.modules:
        raise Unavailable(
            "this torch is built for CUDA and was imported before the rig could keep that code out"
        )
    os.environ[_PYTHON_KERNELS] = f"{__name__}.{no_kernels.__name__}"
    return ctypes.CDLL(str(library(torch)))


def no_kernels(operator: str, dispatch_key: str, kernels: list) -> list:
    """Those of torch's kernels written in Python that stay in front of one of its operators."""
    return []


def arm() -> None:
    """From now on a call of CUDA's own code raises."""
    if (stub := keep_out()) is not None:
        os.environ.pop(_PYTHON_KERNELS, None)  # torch is imported; a child may have no path to this module
        stub.rig_arm()


def library(torch: Torch) -> Path | None:
    """The empty library for this torch, from the cache or freshly built; None where there is nothing to replace."""
    replaced, asking = torch.libraries / _REPLACED, _asking(torch)
    if not replaced.exists():
        return None
    sizes = [path.stat().st_size for path in (replaced, *asking)]
    about = (torch.version, sizes, Path(__file__).read_bytes())
    target = cache_folder() / f"stub-{hashlib.sha256(repr(about).encode()).hexdigest()[:24]}.so"
    with built_once(target) as unfinished:
        if unfinished is not None:
            flags = ["-O0", "-w", "-fPIC", "-shared", f"-Wl,-soname,{_REPLACED}", "-x", "c++", "-"]
            command = [find_compiler(), *flags, "-o", str(unfinished)]
            run(command, f"compiling an empty {_REPLACED} failed", stdin=_source(torch.libraries, asking))
    return target


def _asking(torch: Torch) -> list[Path]:
    """The libraries that cannot be loaded without some symbols of the absent one."""
    return [
        torch.libraries / "libtorch_python.so",
        *sorted((torch.folder.parent / "torchvision").glob("*.so")),
    ]


def _source(libraries: Path, asking: list[Path]) -> str:
    """A definition for every symbol that one of ``asking`` wants and one of the absent libraries defines."""
    wanted = {name for path in asking for name, _, _ in _symbols(path, "--undefined-only")}
    absent = [libraries / name for name in (_REPLACED, _BROUGHT) if (libraries / name).exists()]
    defined = [found for path in absent for found in _symbols(path, "--defined-only")]
    tables = {name for name, _, _ in defined if name.startswith("_ZTV")}
    lines = [_HEAD]
    for name, kind, size in defined:
        if name not in wanted:
            continue
        made = _CONSTRUCTOR.match(name)
        if name.startswith("_ZTI"):
            lines.append(f'extern "C" TypeInfo {name}{_type_info(name[4:])};')
        elif made and f"_ZTVN{made[1]}E" in tables:
            # torch 2.15 makes an object while it is imported, and asks for its type
            lines.append(f"static TypeInfo type_{name}{_type_info(f'N{made[1]}E')};")
            lines.append(f"static Table table_{name}(&type_{name});")
            body = f'missing("{name}"); *self = &table_{name}.functions;'
            lines.append(f'extern "C" void {name}(void** self) {{ {body} }}')
        elif kind in "TtWwi":
            lines.append(f'extern "C" void* {name}() {{ return missing("{name}"); }}')
        else:
            lines.append(f'extern "C" {{ char {name}[{max(size, 8)}] = {{0}}; }}')
    return "\n".join(lines) + "\n"


def _type_info(mangled: str) -> str:
    """The members of the ``TypeInfo`` of a class."""
    return f'{{_ZTVN10__cxxabiv117__class_type_infoE + 16, "{mangled}", 0}}'


def _symbols(path: Path, which: str) -> Iterator[tuple[str, str, int]]:
    """Name, kind (a letter of nm) and size in bytes of the dynamic symbols of a library."""
    listed = run(["nm", "-D", "-S", which, str(path)], f"the symbols of {path.name} cannot be listed")
    for line in listed.splitlines():
        if match := re.fullmatch(r"(?:[0-9a-f]+ )?([0-9a-f]+ )?\s*(\w) (\S+)", line.strip()):
            yield match[3].partition("@")[0], match[2], int(match[1] or "0", 16)
