"""``verify``: reproduces each defect on this machine, without the package and with it."""

from __future__ import annotations

import json
import sys

from ..engine.versions import installed_version
from ..fixes import DISTRIBUTIONS, INDEX
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
    parser.add_argument(
        "--rig",
        action="store_true",
        help="run what needs a CUDA device on fake ones, in a clone of the repository; needs a C++ compiler",
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 when a defect is not patched or was not reproduced."""
    from ..verify import verify

    installed = {name: installed_version(name) for name in DISTRIBUTIONS}
    claimed = (name for fix_id in INDEX for name in declaration(fix_id).claims)
    nothing = nothing_installed(installed, claimed)
    if nothing and not options.json:
        show("\n".join(wrapped(nothing)))
        return 2
    try:
        report = verify(options.ids, options.rig, None if options.json else _show)
    except (ValueError, RuntimeError) as error:  # an unknown id; libraries that cannot be imported
        print(f"diffusers-quantfix: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    return 2 if nothing else 0 if report.ok else 1


def _show(part: str) -> None:
    show(part)
    sys.stdout.flush()  # also where it is a file or a pipe that somebody watches
