"""``verify``: reproduces each defect on this machine, without the package and with it."""

from __future__ import annotations

import json
import sys

from ..fixes import INDEX
from ..text import wrapped
from .pages import declaration
from .summary import nothing_installed
from .terminal import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


EXIT_CODES = (
    "0 every defect that is reproduced here is patched; 1 one is not, one that should be reproduced was not, or a case "
    "timed out; 2 wrong usage, none of the libraries is installed, or they end the process that imports them"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", nargs="*", metavar="id", help="fixes to verify; all when none is named")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 when a defect is not patched or was not reproduced."""
    from ..verify import verify

    try:
        report = verify(options.ids)
    except (ValueError, RuntimeError) as error:  # an unknown id; libraries that cannot be imported
        print(f"diffusers-quantfix: {error}", file=sys.stderr)
        return 2
    claimed = (name for fix_id in INDEX for name in declaration(fix_id).claims)
    nothing = nothing_installed(report.installed, claimed)
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        show("\n".join(wrapped(nothing)) if nothing else str(report))
    return 2 if nothing else 0 if report.ok else 1
