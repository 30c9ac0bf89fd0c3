"""What `doctor` says of the libraries behind diffusers' other quantizers, about which this package has no fix.

Upstream: diffusers/quantizers/auto.py. Its quantizers "bfl" and "nunchaku_lite" have no library of their own.
"""

from __future__ import annotations

from ..engine.versions import installed_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# distribution -> the quantization method of diffusers
_OTHERS = {"auto-round": "auto-round", "nvidia-modelopt": "modelopt", "sdnq": "sdnq"}


def advice() -> Iterator[str]:
    """One sentence for each of these libraries that is installed."""
    for name, method in _OTHERS.items():
        if version := installed_version(name):
            yield (
                f"{name} {version}: no fix is about the quantization method {method!r}; `audit`, `release` and `track` "
                "count its tensors as they count all others"
            )
