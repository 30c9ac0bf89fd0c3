"""The command line: ``python -m diffusers_quantfix`` and the console script ``diffusers-quantfix``.

Exit codes: 0 all is well, 1 something that applies is not mended, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from .activation import settings, status


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="diffusers-quantfix",
        description="Mends known defects of diffusers with quantized models, in the releases that have them.",
        epilog="exit codes: 0 all is well, 1 something that applies is not mended, 2 wrong usage",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    show = commands.add_parser("status", help="what became of every fix here, and why")
    show.add_argument("--json", action="store_true", help="for machines")
    show.set_defaults(run=_status)
    prove = commands.add_parser(
        "verify", help="reproduce each defect on tiny models, without and with the fix, in separate processes"
    )
    prove.add_argument("ids", nargs="*", metavar="id", help="fixes to verify; all when none is named")
    prove.add_argument("--json", action="store_true", help="for machines")
    prove.set_defaults(run=_verify)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code or (2 if settings().problems else 0)  # activation has reported them


def _status(options: argparse.Namespace) -> int:
    # Some releases print when they are imported; standard output is for our answer.
    with contextlib.redirect_stdout(sys.stderr):
        board = status()
    print(json.dumps(board.to_dict(), indent=2) if options.json else board)
    return 0 if board.ok else 1


def _verify(options: argparse.Namespace) -> int:
    from .verify import verify

    try:
        report = verify(options.ids)
    except ValueError as error:  # an id that names no fix
        print(f"diffusers-quantfix: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
