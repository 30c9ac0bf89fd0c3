"""``explain <id>``: everything that is known of one fix."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
import textwrap

from ..activation import known_ids, status
from ..advisories import declarations
from ..fixes import INDEX

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

WIDTH = 80


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
    with contextlib.redirect_stdout(sys.stderr):  # some releases print when they are imported
        answer = status()[options.id]
    fix = next(fix for fix in declarations() if fix.id == options.id)
    module = importlib.import_module(f"{__package__.rpartition('.')[0]}.fixes.{INDEX[fix.id][0]}")
    text = inspect.cleandoc(module.__doc__ or "")
    if options.json:
        page = {
            **answer.to_dict(),
            "symptom": fix.symptom,
            "healed": fix.healed,
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
        ("mended upstream", fix.healed or "in no release yet"),
        ("patches", ", ".join(answer.changes) or f"nothing here; its target is {fix.module}"),
        ("here", f"{answer.state}: {answer.reason}"),
        ("switch off", f"DIFFUSERS_QUANTFIX=skip:{fix.id}, or qf.revert({fix.id!r})"),
        *(("choose", f"DIFFUSERS_QUANTFIX={option}: {what}") for option, what in fix.options.items()),
        *(("upstream", link) for link in fix.upstream or ("not reported yet",)),
    ]
    print(f"{fix.id}\n\n{text}\n")
    for name, value in rows:
        separator = "\n" + " " * 17
        lines = textwrap.wrap(value, WIDTH - 17, break_long_words=False, break_on_hyphens=False)
        print(f"{name:<17}{separator.join(lines)}")
    return 0
