"""How the blocks of the documentation ended: release of a library -> page -> digest of a block -> outcome."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .reasons import reason

FILE = Path(__file__).with_name("results.json")
Row = dict[str, Any]


def row(number: int, without: list[str], ours: list[str]) -> Row:
    """The outcome of one block, without the package and with it: how it ended, and the digest of what it made."""
    return {
        "block": number,
        "without": without[0],
        "with": ours[0],
        "same": without[1] == ours[1],
    }


def fault(one: Row) -> str:
    """What is wrong with an outcome; empty for a good one."""
    if not one["with"].startswith("ok"):
        if one["without"].startswith("ok"):
            return "fails with the package only"
        return "" if reason(one["with"]) else "fails for an unknown reason"
    if one["without"].startswith("ok") and not one["same"]:
        return "the package changes what is computed"
    return ""


def load() -> dict[str, dict[str, dict[str, Row]]]:
    found: dict[str, dict[str, dict[str, Row]]] = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    return found


def save(release: str, page: str, rows: dict[str, Row]) -> None:
    everything = load()
    everything.setdefault(release, {})[page] = rows
    FILE.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n", "utf-8")
