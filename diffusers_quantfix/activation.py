"""Connects the watcher to the fixes; ``diffusers_quantfix.wake`` calls `activate`.

Everything heavy (packaging, importlib.metadata, logging, and wrapt for the fixes that need it) is behind
`diffusers_quantfix.process_runner`, which is imported when the first target is imported or on the first call of
`apply`, `revert` or `status`.
"""

import sys

from .engine.settings import did_you_mean
from .engine.watcher import COMPLETE, Watcher, is_theirs  # noqa: F401  # see there
from .first_library import forget, forget_other_names, give_way, waiting, warn
from .fixes import FIXES, MODULES, NAMES
from .user_settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine.board import Board
    from .engine.runner import Runner
    from .engine.settings import Settings

REPLACED = "another copy of this package replaced this one; apply() replaces that one"
_reported: set[str] = set()
# `importlib.reload` keeps the globals: another runner would not know what this one has patched.
_the_runner: "Runner | None" = globals().get("_the_runner")


def activate() -> None:
    """Watch for the targets, and patch those that are imported already.  Safe to call again; raises only under
    ``strict``."""
    current = settings()
    _heed(current)
    _watcher.replace_other_copies()
    if current.off:
        return
    _watch()
    if any(module in sys.modules for module in MODULES):
        _guarded(lambda: _runner().check_imported())


def apply(*ids: str) -> "Board":
    """Install the fixes that are enabled, match the installed releases and are needed; all of them, or those named.

    Undoes `revert`, and reads the environment variable again.

    Args:
        ids: ids of fixes or names of their targets, as `status` lists them.

    Returns:
        The board.

    Raises:
        TypeError: an id is not a string.
        ValueError: there is no fix with that id.
        diffusers_quantfix.engine.runner.StrictError: under ``strict``, when an enabled fix failed.
    """
    wanted = target_names(ids)
    _heed(settings())
    if not settings().off:
        _watcher.replace_other_copies()
        forget_other_names()
        _watch()
        _runner().apply(wanted)
    return _runner().board()


def revert(*ids: str) -> "Board":
    """Remove fixes; all of them, or those named.  They stay removed until `apply`.

    A patch that other code has wrapped stays installed: its state is "overwritten", and the reason names that code.
    A patch that a live offloaded model needs stays "applied", and the reason says so: models of bitsandbytes, quanto,
    torchao and GGUF under sequential, model or group offload, and any model that is group-offloaded to disk.

    Args:
        ids: ids of fixes or names of their targets, as `status` lists them.

    Returns:
        The board.

    Raises:
        TypeError: an id is not a string.
        ValueError: there is no fix with that id.
    """
    unwanted = target_names(ids)
    runner = _runner()
    if not ids:
        _watcher.stop()
        forget()
    runner.revert(unwanted)
    return runner.board()


def status(load: bool = True) -> "Board":
    """The state of every fix in this process, and the reason.

    Args:
        load: import the target modules that a final answer needs (they are listed on the board as ``loaded``).
            With False nothing is imported, and fixes of libraries not imported yet are "waiting".

    Returns:
        The board; it prints as a table, ``to_dict()`` is for programs.
    """
    if waiting():
        activate()
    runner = _runner()
    return runner.board(runner.settle(load) if _watcher.watching else ())


def _watch() -> None:
    if not _watcher.watching and not give_way(_watcher):
        _watcher.start()


def _arrived(target: str) -> None:
    _guarded(lambda: _runner().arrived(target))


def _guarded(work: "Callable[[], object]") -> None:
    """Run our work inside another library's import: our own errors are not raised, except under ``strict``."""
    try:
        work()
    except Exception as error:
        if is_theirs(error) or settings().strict:
            raise
        _warn(f"activation failed, no fixes applied: {type(error).__name__}: {error}")


def _runner() -> "Runner":
    global _the_runner
    if _the_runner is None:
        try:
            from .process_runner import RUNNER  # the import system ensures that there is only one
        except (SyntaxError, ValueError, EOFError, OSError):
            _watcher.stop()  # a damaged file: do not try again at each of sixty imports
            raise
        _the_runner = RUNNER
        if _watcher.other_names():
            _replaced()
        elif not _watcher.replaced and _watcher.replace_other_copies() and not settings().off:
            _watch()  # the program deleted the package's modules from sys.modules, but not the package
            RUNNER.check_imported()
        _heed(settings())  # by now there may be a notebook, which did not exist when the start-up file ran
    return _the_runner


def _replaced() -> None:
    """A later copy of the package replaces this one: remove our patches."""
    if _the_runner is not None:
        _guarded(lambda: _runner().revert(target_names(()), REPLACED))


def target_names(ids: tuple[str, ...]) -> list[str]:
    """The names of the targets that ``ids`` refer to, as fixes or as targets; of all targets when there are none.

    Raises:
        TypeError: an id is not a string.
        ValueError: there is no fix with that id.
    """
    for fix_id in ids:
        if not isinstance(fix_id, str):
            raise TypeError(
                f"ids of fixes are strings, one argument each, as in revert('{next(iter(FIXES))}'); got {fix_id!r}"
            )
        if fix_id not in NAMES:
            raise ValueError(f"no fix is called {fix_id!r}{did_you_mean(fix_id, NAMES)}")
    return list(dict.fromkeys(name for fix_id in ids or FIXES for name in NAMES[fix_id]))


def hint(error: BaseException) -> str:
    """What `diffusers_quantfix.advisories.crash` says about an uncaught error; that module is loaded only then."""
    from importlib import import_module

    return str(import_module(f"{__package__}.advisories.crash").hint(error))


def _heed(current: "Settings") -> None:
    """Report invalid settings, and watch for uncaught errors if the user wants that."""
    for problem in current.problems:
        _warn(problem)
    if current.hint:
        from .uncaught import watch

        watch(hint)


def _warn(sentence: str) -> None:
    """Log a warning once."""
    if sentence not in _reported:
        _reported.add(sentence)
        warn(sentence)


_watcher = globals().get("_watcher") or Watcher(MODULES, _arrived, _replaced)
