"""The quantizers of diffusers, and what `doctor` says about backends without a fix.

Upstream: diffusers/quantizers/auto.py, whose names are used here.
"""

from __future__ import annotations

import importlib.util
import os

from ..engine.versions import installed_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OTHERS", "PATCHED", "advice"]

# Backends with fixes.
PATCHED = ("bitsandbytes_4bit", "bitsandbytes_8bit", "gguf", "quanto", "torchao")
_SEEN = (
    "`audit`, `release` and `track` count its tensors, and its models move and are offloaded as others are"
)
_UNSEEN = "`audit`, `release` and `track` were not tested with it"
_CONTROLNET = "diffusers-controlnet-from-quantized"
_BUFFERS = ("accelerate-offload-buffers", "diffusers-group-offload-buffers")
# The others -> their distribution, or the folder of diffusers/quantizers that has the code itself; what was seen of
# their models (tests/tools/test_other_quantizers.py); and the fixes about any quantized model that look for theirs.
# nunchaku_lite downloads its kernels, for NVIDIA's GPUs only; diffusers 0.42.1 makes no config for modelopt 0.47.0
# (TypeError "'list' object is not a mapping").
OTHERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "auto-round": ("auto-round", _SEEN, (*_BUFFERS, _CONTROLNET)),
    "bfl": ("/bfl", _SEEN, (*_BUFFERS, _CONTROLNET)),
    "modelopt": ("nvidia-modelopt", _UNSEEN, ()),
    "nunchaku_lite": ("/nunchaku", _UNSEEN, (_CONTROLNET,)),
    "sdnq": ("sdnq", _SEEN, (_CONTROLNET,)),
}


def advice() -> Iterator[str]:
    """One sentence for each of these methods that can be used here."""
    for method, (home, seen, fixes) in OTHERS.items():
        name = "diffusers" if home.startswith("/") else home
        version = installed_version(name)
        if version and (name == home or _in_diffusers(home)):
            alone = (
                f" alone; fixes about any quantized model cover it, like {' and '.join(fixes)}"
                if fixes
                else ""
            )
            yield f"{name} {version}: no fix is about the quantization method {method!r}{alone}; {seen}"


def _in_diffusers(folder: str) -> bool:
    """Whether the installed diffusers has this folder below ``quantizers``; it is not imported."""
    spec = importlib.util.find_spec("diffusers")
    places = spec.submodule_search_locations if spec else None
    return any(os.path.isdir(f"{place}/quantizers{folder}") for place in places or ())
