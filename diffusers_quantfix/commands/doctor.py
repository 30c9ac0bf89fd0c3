"""``doctor``: what is installed, whether it fits together, what is mended here, and which upgrade would end that.

Exit codes: 0; with ``--strict`` 1 when a fix that applies failed or a library cannot be imported.
"""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import textwrap

from ..activation import status
from ..advisories import declarations
from ..engine import board as states
from ..engine.versions import installed_version, judge
from .startup import describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from ..engine.board import Board

WIDTH = 80

# Combinations that import, and then fail in a way that no fix of ours can reach.  Each was seen on real releases.
KNOWN_BAD = (
    (
        {"bitsandbytes": ">=0.45.1,<=0.45.3"},
        "its CPU library needs GLIBCXX_3.4.32; on older systems 4-bit and 8-bit work on a GPU only",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a fix that applies failed")


def run(options: argparse.Namespace) -> int:
    """Print the findings."""
    with contextlib.redirect_stdout(sys.stderr):  # some releases print when they are imported
        board = status()
        found = examine(board)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(found)))
    return 1 if options.strict and found["problems"] else 0


def examine(board: Board) -> dict[str, object]:
    """The findings as data.

    Returns:
        ``installed`` (name -> version or None), ``python``, ``platform``, ``accelerator``, ``activation``,
        ``problems`` and ``notes`` (sentences), ``mended`` (id -> title), ``upgrades`` (release -> ids that it retires),
        ``not_healed`` (ids of applied fixes that no release of upstream heals).
    """
    healed = {fix.id: fix.healed for fix in declarations()}
    applied = [answer for answer in board if answer.state == states.APPLIED]
    bad = (states.FAILED, states.OVERWRITTEN, states.WAITING)
    # One library that cannot be imported keeps all its fixes waiting: say it once.
    problems = list(dict.fromkeys(_problem(answer) for answer in board if answer.state in bad))
    notes = [f"{answer.id}: {answer.reason}" for answer in board if answer.state == states.CANDIDATE]
    for claims, sentence in KNOWN_BAD:
        verdict = judge(claims)
        if verdict.fits:
            notes.append(f"{verdict.reason}: {sentence}")
    upgrades: dict[str, list[str]] = {}
    for answer in applied:
        if healed.get(answer.id):
            upgrades.setdefault(healed[answer.id], []).append(answer.id)
    return {
        "installed": board.installed,
        "python": board.python,
        "platform": platform.platform(),
        "accelerator": _accelerator(),
        "activation": describe(),
        "problems": problems,
        "notes": notes,
        "mended": {answer.id: answer.title for answer in applied},
        "upgrades": upgrades,
        "not_healed": [answer.id for answer in applied if not healed.get(answer.id)],
    }


def _problem(answer: states.Answer) -> str:
    return (
        answer.reason if answer.state == states.WAITING else f"{answer.id} is {answer.state}: {answer.reason}"
    )


def _accelerator() -> str:
    """The accelerators that torch sees, as a sentence."""
    if installed_version("torch") is None:
        return "torch is not installed"
    try:
        import torch

        kind = next(
            (
                name
                for name in ("cuda", "xpu", "mps")
                if getattr(torch, name, None) and getattr(torch, name).is_available()
            ),
            "",
        )
        if not kind:
            return "none: torch runs on the CPU"
        return f"{getattr(torch, kind).device_count()} x {kind}"
    except Exception as error:
        return f"torch cannot say: {error}"


def _lines(found: dict) -> list[str]:  # type: ignore[type-arg]
    def section(title: str, sentences: list[str]) -> list[str]:
        rows = [title]
        for sentence in sentences:
            rows += textwrap.wrap(
                sentence, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
        return [*rows, ""]

    installed = [
        f"{name} {version or '(unreadable)'}"
        for name, version in found["installed"].items()
        if version is not None
    ]
    rows = section("installed", [", ".join(installed) or "none of the libraries that are mended"])
    rows += section(
        "machine", [f"Python {found['python']}, {found['platform']}", f"accelerator: {found['accelerator']}"]
    )
    rows += section("activation", [found["activation"]])
    rows += section("problems", found["problems"] or ["none"])
    if found["notes"]:
        rows += section("notes", found["notes"])
    rows += section(
        "mended here", [f"{id}: {title}" for id, title in found["mended"].items()] or ["nothing needs to be"]
    )
    if found["upgrades"]:
        rows += section(
            "upgrades", [f"{release} retires {', '.join(ids)}" for release, ids in found["upgrades"].items()]
        )
    if found["not_healed"]:
        rows += section("healed by no release yet", [", ".join(found["not_healed"])])
    return rows[:-1]
