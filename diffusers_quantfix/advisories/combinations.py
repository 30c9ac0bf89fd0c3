"""Releases that were seen not to work together, whatever is patched; for `doctor` and `check`.

What the packages themselves require (``Requires-Dist``) is read from the environment instead, see `declared`.
"""

from __future__ import annotations

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..engine.versions import contains, installed_version, judge
from ..fixes import DISTRIBUTIONS
from .ranges import inside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LIBSTDCXX = "GLIBCXX_3.4.32"

# (distribution -> specifier, all must fit; what happens and what to do).  The first three are what became of importing
# the pipelines of 12 releases of diffusers, 0.31.0 to 0.42.1, with 13 of transformers, 4.44.2 to 5.23.0, each with
# each.
COMBINATIONS: tuple[tuple[dict[str, str], str], ...] = (
    (
        {"diffusers": "<0.35.2", "transformers": ">=5"},
        "diffusers cannot be imported (cannot import name 'FLAX_WEIGHTS_NAME' from 'transformers.utils'); use "
        "diffusers 0.35.2 or newer, or transformers before 5",
    ),
    (
        {"diffusers": ">=0.37", "transformers": "<4.48"},
        "diffusers cannot be imported (cannot import name 'Dinov2WithRegistersConfig' from 'transformers'); use "
        "transformers 4.48 or newer",
    ),
    # also what their Requires-Dist says
    (
        {"diffusers": ">=0.40", "transformers": "<5"},
        "there is no huggingface-hub for both (diffusers wants 1.23 or newer, transformers one before 1.0), and "
        "diffusers cannot be imported with the older one; use transformers 5 or newer",
    ),
    # 5.0.0, 5.5.4, 5.10.4 and 5.23.0 do; 4.57.6 has no such limit
    (
        {"transformers": ">=5", "bitsandbytes": "<0.46.1"},
        "transformers refuses to quantize (requires bitsandbytes: `pip install -U bitsandbytes>=0.46.1`), so text "
        "encoders cannot be loaded in 4-bit or 8-bit; use bitsandbytes 0.46.1 or newer",
    ),
    (
        {"diffusers": ">=0.31", "bitsandbytes": "<0.43.3"},
        "diffusers refuses to quantize (requires the latest version of bitsandbytes); use bitsandbytes 0.43.3 or newer",
    ),
    # diffusers 0.33.1 and 0.36.0, each with torchao 0.14.1 to 0.18.0
    (
        {"diffusers": ">=0.33,<0.37", "torchao": ">=0.16"},
        "diffusers cannot be imported (name 'logger' is not defined); use diffusers 0.37 or newer, or torchao before "
        "0.16, or uninstall torchao if nothing else needs it",
    ),
    (
        {"bitsandbytes": ">=0.45.1,<=0.45.3"},
        f"the library for the CPU needs {LIBSTDCXX} (GCC 13); with an older libstdc++, 4-bit and 8-bit work on a GPU "
        "only",
    ),
)


def installed() -> Iterator[tuple[dict[str, str], str]]:
    """The bad combinations in this environment: (claims, sentence)."""
    for claims, sentence in COMBINATIONS:
        verdict = judge(claims)
        if verdict.fits:
            yield claims, f"{verdict.reason}: {sentence}"


def misfitting(pins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(versions, sentence) for the bad combinations that exact pins make; a range may resolve to something better."""
    for claims, sentence in COMBINATIONS:
        held = {name: pins.get(canonicalize_name(name)) for name in claims}
        if all(pin is not None and inside(claims[name], pin) == "yes" for name, pin in held.items()):
            yield ", ".join(f"{name} {pin.removeprefix('==')}" for name, pin in held.items() if pin), sentence


def of_pins(pins: Mapping[str, str]) -> list[str]:
    """Sentences about the bad combinations that exact pins make."""
    return [f"{versions}: {sentence}" for versions, sentence in misfitting(pins)]


def declared() -> list[str]:
    """Sentences about unmet requirements of the installed libraries.

    Installing one more package with pip can break the requirements of an earlier one.
    """
    from importlib import metadata

    sentences = []
    for name in DISTRIBUTIONS:
        try:
            demands = metadata.requires(name) or []
            version = installed_version(name)
        except Exception:  # not installed, or broken metadata: the board says so
            continue
        for text in demands:
            try:
                demand = Requirement(text)
                if demand.marker is not None and not demand.marker.evaluate({"extra": ""}):
                    continue
                found = installed_version(demand.name)
                if found is None:
                    sentences.append(f"{name} {version} needs {demand.name}, which is not installed")
                elif not contains(str(demand.specifier), found):
                    sentences.append(
                        f"{name} {version} needs {demand.name} {demand.specifier}, and {found} is installed"
                    )
            except Exception:  # unreadable metadata of another package is not our business
                continue
    return sentences
