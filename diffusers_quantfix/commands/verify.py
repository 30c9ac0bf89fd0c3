"""``verify``: the proof on this machine."""

from __future__ import annotations

import json
import sys

from .terminal import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


EXIT_CODES = (
    "0 every defect that shows here is patched; 1 one is not, or one that should show did not; 2 wrong usage, or the "
    "libraries end the process that imports them"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", nargs="*", metavar="id", help="fixes to verify; all when none is named")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 when a defect is not patched or did not show."""
    from ..verify import verify

    try:
        report = verify(options.ids)
    except (ValueError, RuntimeError) as error:  # an id that names no fix; a stack that cannot be asked
        print(f"diffusers-quantfix: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        show(str(report))
    return 0 if report.ok else 1
