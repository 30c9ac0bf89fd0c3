"""``run app.py``, ``run -m module``, ``run accelerate launch``: a program and its children, with the package active."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys

from ..activation import hint
from ..uncaught import watch
from .terminal import refuse, unwritten

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

USAGE = "usage: diffusers-quantfix run [-m module | script.py | console script] [argument ...]"
EXIT_CODES = "those of the program; 2 when there is no program to run"


def run(arguments: list[str]) -> int:
    """Run a program as ``python`` would, in this process, in which the package is active already.

    ``sys.argv``, ``sys.path[0]`` and ``__main__`` are the same as without this package; we exit with its exit code, and
    its traceback has no frame of ours.  Child processes of this environment are activated through
    ``DIFFUSERS_QUANTFIX_AUTO``, which the start-up file reads.

    Returns:
        0 when the program ended, 2 when there was none to run.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        return _help()
    module = arguments[:1] == ["-m"]
    arguments = arguments[1:] if module else arguments
    if not arguments or (arguments[0].startswith("-") and not module):
        return refuse("name a script, or a module after -m", before=f"{USAGE}\n")
    try:
        return _run_module(arguments) if module else _run_script(arguments)
    except SystemExit:
        raise
    except BaseException:
        # The interpreter prints it after we return, through the hook that the program has installed.
        sys.excepthook = _End(sys.excepthook)
        raise


def _help() -> int:
    what = "Run a program with the package activated, and its children too."
    try:
        print(f"{USAGE}\n\n{what}\n\nexit codes: {EXIT_CODES}", flush=True)
    except OSError as error:
        return unwritten(error)
    return 0


def _run_module(arguments: list[str]) -> int:
    # `python -m` puts the working directory first; it is there already because of our own `-m`, or missing when the
    # console script was used.
    if sys.path[:1] not in ([""], [os.getcwd()]):
        sys.path.insert(0, os.getcwd())
    if _no_such_module(arguments[0]):
        return refuse(f"no module named {arguments[0]!r} here")
    _activate(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    return 0


def _run_script(arguments: list[str]) -> int:
    target = arguments[0]
    if not os.path.exists(target):
        script = _console_script(target)
        if not script:
            return refuse(_no_such_script(target))
        arguments = [script, *arguments[1:]]
        target = script
    if os.path.isfile(target):
        first = os.path.dirname(os.path.abspath(target))
        if sys.path[:1] in ([""], [os.getcwd()]):
            sys.path[0] = first
        else:
            sys.path.insert(0, first)
    _activate(arguments)
    runpy.run_path(target, run_name="__main__")
    return 0


def _activate(arguments: list[str]) -> None:
    os.environ["DIFFUSERS_QUANTFIX_AUTO"] = "1"
    sys.argv = arguments
    watch(hint)


def _console_script(name: str) -> str:
    """The file of a console script of this environment that is written in Python; empty where there is none."""
    if os.path.dirname(name):
        return ""
    path = os.path.join(os.path.dirname(sys.executable), name)
    with contextlib.suppress(OSError), open(path, "rb") as file:
        start = file.read(512)
        if start.startswith(b"#!") and b"python" in start:
            return path
    return ""


def _no_such_script(name: str) -> str:
    import shutil

    elsewhere = None if os.path.dirname(name) else shutil.which(name)
    if elsewhere is None:
        return f"there is no file {name!r}"
    return (
        f"there is no file {name!r}, and {elsewhere} is no Python script of this environment; to activate the Python "
        f"processes that it starts, type: DIFFUSERS_QUANTFIX_AUTO=1 {name} ..."
    )


def _no_such_module(name: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # a missing parent package
        return True


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame is of this command or of runpy, through which it runs the program."""
    namespace = frame.f_globals
    home = str(namespace.get("__package__") or namespace.get("__name__"))
    return home.partition(".")[0] in (__name__.partition(".")[0], runpy.__name__)


class _End:
    """The hook that prints the error which ended the program, without our frames."""

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        while traceback is not None and _is_ours(traceback.tb_frame):
            traceback = traceback.tb_next
        error.__traceback__ = traceback
        self._before(kind, error, traceback)
