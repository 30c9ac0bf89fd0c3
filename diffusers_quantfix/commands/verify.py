"""``verify``: reproduces each bug on this machine, without the package and with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading

from ..engine.versions import installed_version
from ..fixes import DISTRIBUTIONS
from ..fixes.targets import TARGETS
from ..text import wrapped
from .summary import nothing_installed
from .terminal import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from types import FrameType


EXIT_CODES = (
    "0 every bug that was reproduced here is patched; 1 one is not, one that should have been reproduced was not, or a "
    "case timed out; 2 wrong usage, none of the libraries is installed, or they end the process that imports them"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", nargs="*", metavar="id", help="fixes to verify; default: all")
    parser.add_argument(
        "--rig",
        action="store_true",
        help="run what needs a CUDA device on fake ones, in a clone of the repository; needs a C++ compiler",
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 if a bug is not patched or was not reproduced."""
    from ..verify import verify

    installed = {name: installed_version(name) for name in DISTRIBUTIONS}
    claimed = (name for target in TARGETS.values() for name in target.claims)
    nothing = nothing_installed(installed, claimed)
    if nothing and not options.json:
        show("\n".join(wrapped(nothing)))
        return 2
    try:
        with _cleaned_up():
            report = verify(options.ids, options.rig, None if options.json else _show)
    except (ValueError, RuntimeError) as error:  # an unknown id; libraries that cannot be imported
        print(f"diffusers-quantfix: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    return 2 if nothing else 0 if report.ok else 1


class _Ended(BaseException):
    """A signal that ends this process."""


@contextlib.contextmanager
def _cleaned_up() -> Iterator[None]:
    """Makes a signal that would end the process at once, such as SIGTERM, end the block first, as Ctrl-C does.

    Otherwise the two processes of `verify` and its temporary folder would remain.  If the program that called `main`
    has its own handler, it is kept.
    """
    names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        for one in ours:
            signal.signal(one, signal.SIG_IGN)  # a second one must not interrupt the clean-up
        raise _Ended(number)

    for one in ours:
        signal.signal(one, end)
    by = None
    try:
        yield
    except _Ended as ended:
        by = ended.args[0]
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)
    if by is not None:
        os.kill(os.getpid(), by)


def _show(part: str) -> None:
    show(part)
    sys.stdout.flush()  # it may be a file or a pipe that somebody watches
