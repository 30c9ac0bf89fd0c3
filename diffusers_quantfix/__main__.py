"""The command line: ``python -m diffusers_quantfix`` and the console script ``diffusers-quantfix``.

Exit codes: 0 success, 1 a bug is present and not patched, 2 wrong usage, or the output could not be written; each
command's ``--help`` gives the details.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from types import ModuleType

from . import __version__
from .commands.terminal import fit_terminal, refuse, unwritten
from .engine.settings import did_you_mean
from .user_settings import settings

# Each command (a module of the same name in `commands`) and what it does.
COMMANDS = {
    "status": "the state of every fix here, and the reason",
    "verify": "reproduce each bug on tiny models, without and with the fix",
    "doctor": "what is installed, what is incompatible, which upgrade makes which fix unnecessary",
    "explain": "which bug an error message belongs to, and what to do; or all details of one fix",
    "check": "the known bugs in pinned versions, from requirements and lock files",
    "run": "run a program with the package activated: run app.py ..., run -m module ...",
    "enable": "activate at every start of this environment's interpreter",
    "disable": "undo `enable`",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["run"]:  # all further arguments belong to the program
        from .commands.run import run

        return run(arguments[1:])
    if _imports_libraries(arguments):
        from .commands.importing import guarded

        return guarded(lambda: _answered(arguments))
    return _answered(arguments)


def _imports_libraries(arguments: list[str]) -> bool:
    """Whether a command imports libraries in its own process, which they may end."""
    help = {"-h", "--help"} & set(arguments)
    return not help and (arguments[:1] in (["status"], ["doctor"]) or "--here" in arguments[1:])


def _answered(arguments: list[str]) -> int:
    try:
        code = _answer(arguments)
        _flush()
    except KeyboardInterrupt:
        print(f"diffusers-quantfix: {arguments[0]} was interrupted", file=sys.stderr)
        return 130
    except (SyntaxError, ImportError) as error:
        if not _is_about_us(error):
            raise
        return refuse(f"this installation is damaged; install diffusers_quantfix again ({error})")
    except OSError as error:
        if error.errno is None or error.filename is not None:  # raised by a library, or about another file
            raise
        return unwritten(error)
    return code or (2 if settings().problems else 0)  # activation has reported them


def _is_about_us(error: SyntaxError | ImportError) -> bool:
    """Whether a file of this package is missing or cannot be read as Python."""
    if isinstance(error, SyntaxError):
        return str(error.filename).startswith(os.path.join(os.path.dirname(__file__), ""))
    return (error.name or "").partition(".")[0] == __package__


def _answer(arguments: list[str]) -> int:
    try:
        parser = _parser(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "packaging":
            raise
        return refuse("packaging is not installed, and versions cannot be compared without it; install it")
    try:
        options = parser.parse_args(arguments or ["--help"])
    except SystemExit:  # after --help and --version, and for wrong usage
        _flush()
        raise
    if sys.stdout is None:
        return refuse("standard output is closed")
    fit_terminal()
    code: int = _module(options.command).run(options)
    return code


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diffusers-quantfix",
        description="Patches known bugs of diffusers with quantized models, in affected releases.",
        epilog="exit codes: 0 success, 1 a bug is present and not patched, 2 wrong usage; "
        "`diffusers-quantfix COMMAND --help` gives the details",
    )
    parser.add_argument("--version", action="version", version=f"diffusers_quantfix {__version__}")
    name = arguments[0] if arguments else ""
    if name and not name.startswith("-") and name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS).replace(
            "python -m diffusers_quantfix status", "diffusers-quantfix --help"
        )
        parser.error(f"no command is called {name!r}{hint}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command, help in COMMANDS.items():
        if name == command:
            module = _module(command)
            epilog = f"exit codes: {module.EXIT_CODES}"
            module.add_arguments(subparsers.add_parser(command, help=help, description=help, epilog=epilog))
        else:
            subparsers.add_parser(command, help=help)
    return parser


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _module(name: str) -> ModuleType:
    # Each command is imported only when it is called: `check` must not pay for `verify`.
    return importlib.import_module(f"{__package__}.commands.{name}")


if __name__ == "__main__":
    sys.exit(main())
