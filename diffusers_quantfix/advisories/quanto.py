"""What works where with optimum-quanto: a table for `doctor`, read from the sources of 0.2.5, 0.2.6 and 0.2.7."""

from __future__ import annotations

import importlib.util
import sys

from .ranges import fits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# (platforms as in sys.platform, "" for any; accelerators as torch names them, None for any; distribution ->
# specifier, all must fit; the sentence).
ADVICE: tuple[tuple[str, tuple[str, ...] | None, dict[str, str], str], ...] = (
    (
        "win32",
        None,
        {"optimum-quanto": ">=0.2.7"},
        "optimum-quanto 0.2.7 wants torch 2.6 or newer: beside an older torch with CUDA, pip on Windows installs one "
        "without CUDA in its place; install torch first (https://pytorch.org/get-started/locally)",
    ),
    (
        "win32",
        None,
        {"optimum-quanto": "<0.2.7"},
        "optimum-quanto runs float8, int8, int4 and int2 weights by PyTorch here, and compiles nothing; "
        "DIFFUSERS_QUANTFIX=quanto:build does (it needs Visual Studio, and for a GPU the CUDA toolkit)",
    ),
    (
        "linux",
        ("cuda",),
        {"optimum-quanto": ""},
        "optimum-quanto runs float8 weights by PyTorch; DIFFUSERS_QUANTFIX=quanto:marlin uses its compiled kernel, "
        "which needs nvcc and compute capability 8.0 or newer",
    ),
    (
        "darwin",
        ("mps",),
        {"optimum-quanto": ">=0.2.7"},
        "optimum-quanto 0.2.7 cannot compile its Metal extension (its wheel lacks unpack.mm): int4 and int2 weights "
        "are unpacked by PyTorch",
    ),
    (
        "",
        None,
        {"optimum-quanto": "<0.2.6", "diffusers": ">=0.33"},
        "diffusers takes optimum-quanto 0.2.6 or newer for its QuantoConfig; quanto's own quantize() works",
    ),
    (
        "",
        None,
        {"optimum-quanto": "", "diffusers": "<1"},
        "optimum-quanto is no longer maintained, and diffusers drops it with 1.0: bitsandbytes is the alternative "
        "for 8-bit and 4-bit weights, on Windows too",
    ),
)

# torch.utils.cpp_extension, which quanto imports, imports it. torch demands it for Python 3.12 and newer, and for older
# ones only from 2.11 on (2.7 and 2.8 get it through triton); `uv venv` creates environments without it. There is no
# fix: quanto fails in the middle of its import, so there is no module to patch, and the only workaround from outside is
# a fake torch.utils.cpp_extension in sys.modules, which would mislead every other library that checks whether it can
# compile here. The error names what is missing, and one command installs it.
WITHOUT_SETUPTOOLS = (
    "optimum-quanto cannot be imported without setuptools (ModuleNotFoundError: No module named 'setuptools', from "
    "torch.utils.cpp_extension), and this torch has not brought it: install setuptools"
)


def advice(versions: Mapping[str, str], kind: str) -> list[str]:
    """The sentences of the table that apply here.

    Args:
        versions: distribution -> installed version.
        kind: the accelerator that torch sees, "" for none.
    """

    def all_fit(claims: Mapping[str, str]) -> bool:
        return all(name in versions and fits(claim, versions[name]) for name, claim in claims.items())

    said = []
    if "optimum-quanto" in versions and not _has_setuptools():
        said.append(WITHOUT_SETUPTOOLS)
    return said + [
        sentence
        for platform, kinds, claims, sentence in ADVICE
        if platform in ("", sys.platform) and (kinds is None or kind in kinds) and all_fit(claims)
    ]


def _has_setuptools() -> bool:
    try:
        return "setuptools" in sys.modules or importlib.util.find_spec("setuptools") is not None
    except Exception:  # another tool's finder failed: cannot tell
        return True
