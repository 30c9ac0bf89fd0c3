"""``run app.py ...`` and ``run -m module ...``: a program with the package activated, and its children too."""

from __future__ import annotations

import os
import runpy
import sys

USAGE = "usage: diffusers-quantfix run [-m module | script.py] [argument ...]"
EXIT_CODES = "those of the program; 2 when there is none to run"


def run(arguments: list[str]) -> int:
    """Run a program as ``python`` would, in this process, in which the package is active already.

    ``sys.argv``, ``sys.path[0]`` and ``__main__`` are those that the program would see without us; its exit code is
    ours.  Child processes of this environment are activated through ``DIFFUSERS_QUANTFIX_AUTO``, which the start-up
    file reads.

    Returns:
        0 when the program ended, 2 when there was none to run.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        print(
            f"{USAGE}\n\nRun a program with the package activated, and its children too.\n\nexit codes: {EXIT_CODES}"
        )
        return 0
    module = arguments[:1] == ["-m"]
    arguments = arguments[1:] if module else arguments
    if not arguments or (arguments[0].startswith("-") and not module):
        print(f"{USAGE}\ndiffusers-quantfix: name a script, or a module after -m", file=sys.stderr)
        return 2
    target = arguments[0]
    os.environ["DIFFUSERS_QUANTFIX_AUTO"] = "1"
    sys.argv = arguments
    if module:
        # `python -m` puts the working directory first; it stands there already, from our own `-m`, or is missing
        # when the console script was used.
        if sys.path[:1] not in ([""], [os.getcwd()]):
            sys.path.insert(0, os.getcwd())
        if _no_such_module(target):
            print(f"diffusers-quantfix: no module is called {target!r} here", file=sys.stderr)
            return 2
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return 0
    if not os.path.exists(target):
        print(f"diffusers-quantfix: there is no file {target!r}", file=sys.stderr)
        return 2
    if os.path.isfile(target):
        first = os.path.dirname(os.path.abspath(target))
        if sys.path[:1] in ([""], [os.getcwd()]):
            sys.path[0] = first
        else:
            sys.path.insert(0, first)
    runpy.run_path(target, run_name="__main__")
    return 0


def _no_such_module(name: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # a parent package that is not there
        return True
