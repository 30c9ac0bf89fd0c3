"""``explain <id>``: everything that is known of one fix."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys

from ..activation import known_ids, status
from ..advisories.findings import declarations
from ..fixes import INDEX
from ..text import wrapped
from .terminal import show, stdout_to_stderr

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXIT_CODES = "0; 2 when the id names no fix"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", help="a fix, as `status` lists it")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print the page of one fix; 2 when the id names none."""
    try:
        known_ids((options.id,))
    except ValueError as error:
        print(f"diffusers-quantfix: {error}", file=sys.stderr)
        return 2
    with stdout_to_stderr():
        answer = status()[options.id]
    fix = next(fix for fix in declarations() if fix.id == options.id)
    module = importlib.import_module(f"{__package__.rpartition('.')[0]}.fixes.{INDEX[fix.id][0]}")
    text = inspect.cleandoc(module.__doc__ or "")
    if options.json:
        page = {
            **answer.to_dict(),
            "symptom": fix.symptom,
            "fixed_in": fix.fixed_in,
            "hot": fix.hot,
            "options": fix.options,
            "text": text,
        }
        print(json.dumps(page, indent=2))
        return 0
    versions = " and ".join(f"{name} {claim or '(any version)'}" for name, claim in fix.claims.items())
    rows = [
        ("symptom", fix.symptom),
        ("versions", versions),
        ("fixed upstream", fix.fixed_in or "in no release yet"),
        ("patches", ", ".join(answer.changes) or f"nothing here; its target is {fix.module}"),
        ("here", f"{answer.state}: {answer.reason}"),
        ("switch off", f"DIFFUSERS_QUANTFIX=skip:{fix.id}, or qf.revert({fix.id!r})"),
        *(("choose", f"DIFFUSERS_QUANTFIX={option}: {what}") for option, what in fix.options.items()),
        *(("upstream", link) for link in fix.upstream or ("not reported yet",)),
    ]
    lines = [fix.id, "", *_flowed(text), ""]
    for name, value in rows:
        lines += wrapped(value, f"{name:<17}", " " * 17)
    show("\n".join(lines))
    return 0


def _flowed(text: str) -> list[str]:
    """A docstring at our width: its paragraphs, and in them its entries, which begin with "Symptom: " and the like."""
    lines: list[str] = []
    for paragraph in text.replace("``", "`").split("\n\n"):
        for entry in re.split(r"\n(?=[A-Z][a-z]+: )", paragraph):
            titled = re.match(r"[A-Z][a-z]+: ", entry)
            lines += wrapped(" ".join(entry.split()), "", "    " if titled else "")
        lines.append("")
    return lines[:-1]
