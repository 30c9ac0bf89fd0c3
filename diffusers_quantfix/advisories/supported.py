"""The oldest and newest releases that this version was tested with, for doctor, check and the pages.

`python -m tests.upstream --add NAME=RELEASE --write` keeps the newest ones up to date.
"""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

RELEASES = {
    "diffusers": ("0.31.0", "0.42.1"),
    "transformers": ("4.44.2", "5.24.0"),
    "accelerate": ("0.34.2", "1.15.0"),
    "bitsandbytes": ("0.43.0", "0.50.2"),
    "optimum-quanto": ("0.2.5", "0.2.7"),
    "peft": ("0.13.2", "0.21.2"),
    "torchao": ("0.15.0", "0.18.0"),
}
TORCH = ("2.5.1", "2.15.0")
PYTHON = ("3.10", "3.13")


def outside(name: str, version: str, tested: tuple[str, str]) -> str:
    """A sentence that a version of torch or Python was not tested; empty if it is in the tested range.

    Only the numbers that the range names count: Python 3.13.5 is 3.13, and torch 2.13.0+cu130 is 2.13.0.
    """
    try:
        found = Version(version).release
    except InvalidVersion:
        return ""
    oldest, newest = (Version(end).release for end in tested)
    if found < oldest:
        return f"{name} {version} is older than {tested[0]}, the oldest one that was tested; {_ADVICE}"
    if found[: len(newest)] > newest:
        return f"{name} {version} is newer than {tested[1]}, the newest one that was tested; {_ADVICE}"
    return ""


def newer(installed: dict[str, str | None]) -> list[str]:
    """One sentence for each of the ``installed`` releases (name -> version) that is newer than those of `RELEASES`."""
    sentences = []
    for name, version in installed.items():
        newest = RELEASES.get(name, ("", ""))[1]
        try:
            if not newest or not version or Version(version) <= Version(newest):
                continue
        except InvalidVersion:
            continue
        sentences.append(
            f"{name} {version} is newer than {newest}, the newest release that this version of the package was tested "
            "with: a known bug is patched there only if all code that its fix relies on is unchanged"
        )
    return sentences


_ADVICE = "`python -m diffusers_quantfix verify` shows whether the fixes work with it"
