"""Uncaught errors: one more line on standard error, after the traceback.

At the end of a program an `atexit` function runs.  By then the interpreter has printed the error through
``sys.excepthook`` and keeps it in ``sys.last_value``.  So that hook is left alone, and hooks that others set before or
after us need not know about us.  Where a program continues after an error (threads, a prompt, notebooks) a hook is
chained.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_sentence: Callable[[BaseException], str] | None = None
_last: tuple[int, str] = (
    0,
    "",
)  # the id of an error and its sentence; a reference to the error would keep all its frames alive
_notebook: Any = None


def watch(sentence: Callable[[BaseException], str]) -> None:
    """From now on, print ``sentence(error)`` after each uncaught error, unless it is empty.  Safe to call again."""
    global _sentence
    first, _sentence = _sentence is None, sentence
    if first:
        import atexit
        import threading

        atexit.register(_at_exit)
        threading.excepthook = _chained(threading.excepthook, lambda arguments: arguments.exc_value)
        if hasattr(sys, "ps1"):  # a prompt
            sys.excepthook = _chained(sys.excepthook, lambda kind, error, traceback: error)
    _watch_cells()


def _chained(before: Callable[..., object], error_of: Callable[..., Any]) -> Callable[..., None]:
    def hook(*arguments: Any) -> None:
        try:
            before(*arguments)
        finally:
            _print(error_of(*arguments))

    return hook


def _watch_cells() -> None:
    """IPython and Jupyter print the error of a cell themselves; their events report it afterwards."""
    global _notebook
    try:
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is not None and shell is not _notebook:
            shell.events.register("post_run_cell", _after_a_cell)
            _notebook = shell
    except Exception:
        pass  # an unknown version of IPython


def _after_a_cell(result: Any = None) -> None:
    _print(getattr(result, "error_in_exec", None))


def _at_exit() -> None:
    _print(getattr(sys, "last_value", None))


def _print(error: BaseException | None) -> None:
    """Print the sentence for an error, once."""
    global _last
    try:
        if not isinstance(error, Exception) or _sentence is None:
            return
        sentence = _sentence(error)
        last, _last = _last, (id(error), sentence)
        if sentence and _last != last and sys.stderr is not None:
            sys.stderr.write(f"diffusers-quantfix: {sentence}\n")
            sys.stderr.flush()
    except Exception:
        pass  # never add a second error to the program's own
