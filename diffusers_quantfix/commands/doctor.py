"""``doctor``: what is installed, whether it is compatible, what is patched here, which upgrades replace fixes."""

from __future__ import annotations

import json
import platform
import sys

from ..activation import status
from ..advisories import combinations, machine, supported
from ..advisories.findings import environment_pins, findings
from ..advisories.upgrades import Upgrade, upgrades
from ..engine import board as states
from ..engine.versions import installed_version
from ..fixes import DISTRIBUTIONS
from ..fixes.targets import TARGETS
from ..text import wrapped
from .importing import importing
from .startup import describe
from .summary import nothing_installed
from .terminal import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from ..engine.board import Board

EXIT_CODES = (
    "0; with --strict 1 if a needed fix failed or was overwritten, a library cannot be imported, or a fix is a "
    "candidate above its claimed range; 2 wrong usage, or a library ended the process"
)

_MOST = 4  # bugs and upgrades that are listed without --all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--all", action="store_true", help="list every patched bug and every upgrade")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there is a problem")


def run(options: argparse.Namespace) -> int:
    """Print the findings; those about versions come before any library is imported."""
    found = examine_versions()
    if not options.json:
        show("\n".join(_first_lines(found)))
        sys.stdout.flush()
    with importing():
        board = status()
        found |= examine(board)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show("\n".join(["", *_lines(board, found, options.all)]))
    return 1 if options.strict and found["problems"] else 0


def examine_versions() -> dict[str, Any]:
    """The findings that need no library import, as data.

    Returns:
        ``installed`` (name -> version or None), ``python``, ``interpreter`` (its path), ``platform``, ``activation``
        and ``combinations`` (sentences on releases that do not fit together).
    """
    return {
        "installed": {name: installed_version(name) for name in DISTRIBUTIONS},
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "platform": platform.platform(),
        "activation": describe(),
        "combinations": [
            *(sentence for claims, sentence in combinations.installed() if not machine.covers(claims)),
            *combinations.declared(),
        ],
    }


def examine(board: Board) -> dict[str, Any]:
    """The other findings as data.

    Returns:
        ``accelerator``, ``problems`` (what is broken now), ``advice`` (for this machine), ``candidates`` (bugs in
        releases that no claim covers), ``patched`` (id -> title), ``same_code`` (target -> why it is patched above
        its claim), ``upgrades`` (see `advisories.upgrades`) and ``not_fixed`` (ids of applied fixes whose bug no
        upstream release fixes).  All but ``accelerator``, ``patched`` and ``same_code`` are lists of sentences, ids
        or upgrades.
    """
    fixed_in = {name: target.fixed_in for name, target in TARGETS.items()}
    applied = [answer for answer in board if answer.state in (states.APPLIED, states.UNCLAIMED)]
    bad = [
        answer
        for answer in board.targets
        if answer.state in (states.FAILED, states.OVERWRITTEN, states.WAITING)
    ]
    above = sum(answer.above for answer in board.targets)
    newer = f"known bugs in releases newer than this version of the package supports: {above}, see candidates"
    kind, seen = machine.accelerator()
    pins = environment_pins()
    patched = {answer.id for answer in board.targets if answer.state in (states.APPLIED, states.UNCLAIMED)}
    have = [finding for finding in findings(pins, complete=True) if finding.id in patched]
    releases = upgrades(pins, have, complete=True)
    return {
        "accelerator": seen,
        # A library that cannot be imported keeps all its fixes waiting: report it once.
        "problems": list(dict.fromkeys([*map(_problem, bad), *([newer] if above else [])])),
        "advice": machine.advice(board, kind),
        "candidates": [
            f"{answer.id}: {answer.reason}" for answer in board.targets if answer.state == states.CANDIDATE
        ],
        "patched": {answer.id: answer.title for answer in applied},
        "same_code": {answer.id: answer.reason for answer in board.targets if answer.same_code},
        "upgrades": [upgrade.to_dict() for upgrade in releases],
        "not_fixed": [
            fix.id
            for fix in applied
            if not all(fixed_in.get(one.id) for one in fix.targets if one.id in patched)
        ],
    }


def _problem(answer: states.Answer) -> str:
    if answer.state == states.WAITING:
        return answer.reason
    return f"{answer.id} is {answer.state}: {answer.reason}"


def _first_lines(found: dict[str, Any]) -> list[str]:
    installed = [
        f"{name} {version or '(unreadable)'}"
        for name, version in found["installed"].items()
        if version is not None
    ]
    return _sections(
        ("newer than tested", supported.newer(found["installed"])),
        ("installed", [", ".join(installed) or "none of the libraries that are patched"]),
        ("activation", [found["activation"]]),
        ("does not fit together", found["combinations"]),
    )


def _lines(board: Board, found: dict[str, Any], every: bool = False) -> list[str]:
    nothing = nothing_installed(board.installed, (name for answer in board for name in answer.claims))
    first = wrapped(nothing) if nothing else states.summary(board) if board.candidates else []
    upgrade_lines = [
        str(Upgrade(**upgrade)).replace(" fixes ", " retires ", 1) for upgrade in found["upgrades"]
    ]
    if found["not_fixed"]:
        count = len(found["not_fixed"])
        upgrade_lines.append(f"{count} of {len(found['patched'])} have no upstream fix yet")
    patched = [
        f"{id}: {title}{'; ' + found['same_code'][id] if id in found['same_code'] else ''}"
        for id, title in found["patched"].items()
    ]
    if not every:
        said = "`python -m diffusers_quantfix doctor --all` lists them"
        patched = [f"{len(patched)} bugs; {said}"] if len(patched) > _MOST else patched
        patched += filter(None, [states.by_code(board)])
        if len(upgrade_lines) > _MOST:
            upgrade_lines[_MOST - 1 : -1] = [f"{len(upgrade_lines) - _MOST} more; {said}"]
    rows = _sections(
        ("problems", found["problems"] or ([] if nothing else ["none"])),
        ("machine", [machine.machine(), f"accelerator: {found['accelerator']}"]),
        ("on this machine", found["advice"]),
        ("candidates", found["candidates"]),
        ("patched here", patched or ([] if nothing else ["none"])),
        ("upgrades", upgrade_lines),
    )
    return [*first, "", *rows] if first else rows


def _sections(*sections: tuple[str, list[str]]) -> list[str]:
    rows: list[str] = []
    for title, sentences in sections:
        if sentences:
            rows += ["", title] if rows else [title]
            for sentence in sentences:
                rows += wrapped(sentence, "  ", "    ")
    return rows
