"""The process in which the cases run: ``python -m diffusers_quantfix.verify.child results work [id ...]``.

It imports the libraries, reports the board, reads one line of ids from standard input, and runs their cases in that
order. With a rig (``tests/rig/cases.py`` in a clone), the cases that need a CUDA device follow on it; cases that may
end the process come last. It writes its events to the file ``results``, one JSON line each, since the libraries may
print anything.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import sys

from ..activation import status
from ..engine.board import WAITING
from ..engine.target import import_target, say
from ..fixes import FIXES, NAMES
from ..fixes.targets import TARGETS
from ..user_settings import settings
from .case import CannotReproduce, NeedsDevice
from .rig import NO_CODE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from types import ModuleType
    from typing import Any

    Devices = Callable[[], AbstractContextManager[None]]


def case_module(fix_id: str) -> str:
    """The module that holds the case of a fix."""
    return f"{__package__}.cases.{fix_id.replace('-', '_')}"


def main(results: str, work: str, *ids: str, devices: Devices | None = None, without: str = "") -> None:
    """Report the board, then run the requested cases.

    Args:
        results: the file to which the events are appended.
        work: a folder for the files of the cases.
        ids: the fixes whose libraries are imported; all libraries if empty.
        devices: a context manager that gives this process CUDA devices, for cases that need them.
        without: why there are no such devices although they were requested, as a sentence.
    """
    # The imports create a million lasting objects: collections took a fifth of the time of imports and cases.
    gc.disable()
    with open(results, "a", encoding="utf-8") as file:

        def write(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()  # the parent shows the progress, and must know the current case if this process dies

        if settings().off:
            _import_the_libraries(ids)
            write(event="ready", without=without)
        else:
            write(event="ready", without=without, board=_board(ids))
        gc.freeze()
        gc.enable()
        _compile_nothing()
        _run(sys.stdin.readline().split(), work, write, devices)


def _targets(ids: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(TARGETS[name].module for fix_id in ids or FIXES for name in NAMES[fix_id]))


def _board(ids: tuple[str, ...]) -> dict[str, Any]:
    """The board; for fixes not in ``ids``, only what is known without importing their libraries."""
    if not ids:
        return status().to_dict()
    faults = {target: import_target(target) for target in _targets(ids)}
    board: dict[str, Any] = status(load=False).to_dict()
    for answer in (target for fix in board["fixes"] for target in fix["targets"]):
        state, reason = faults.get(answer["module"], ("", ""))
        if state and answer["state"] == WAITING:
            answer.update(state=state, reason=reason)
    return board


def _import_the_libraries(ids: Iterable[str]) -> None:
    """Import what the board imports; otherwise this side would do so later, in its first case."""
    for target in _targets(ids):
        with contextlib.suppress(Exception):  # not installed, or broken: the case will report it
            importlib.import_module(target)


def _compile_nothing() -> None:
    """Let quanto use its extensions if they are compiled, and PyTorch operations if not.

    quanto compiles in its own package folder, and does so again if another version of ninja built the extension. That
    takes longer than all cases together, and no case is about it. A process killed meanwhile (this one has a time
    limit) leaves a lock there for which every later program waits.
    """
    home = "optimum.quanto.library.extensions."
    for name in [name for name in sys.modules if name.startswith(home)]:
        extension = getattr(sys.modules[name], "ext", None)
        if extension is None or getattr(extension, "_lib", None) is not None:
            continue
        from ..weights.quanto_extension import StandIn

        compiled = _compiled(extension.name, extension.build_directory)
        extension._lib = compiled or StandIn(extension.name, "is not compiled for verify")


def _compiled(name: str, folder: str) -> Any:
    """The extension if it is compiled for this torch, else None."""
    import torch

    try:
        with open(os.path.join(folder, "pytorch_version.txt")) as file:
            if file.read().rstrip() != torch.__version__ or os.path.exists(os.path.join(folder, "lock")):
                return None
        path = os.path.join(folder, name + (".pyd" if sys.platform == "win32" else ".so"))
        spec: Any = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (OSError, ImportError):
        return None
    return module


def _run(ids: Iterable[str], work: str, write: Callable[..., None], devices: Devices | None) -> None:
    ids = list(ids)
    crashing = [fix_id for fix_id in ids if _may_crash(fix_id)]
    others = [fix_id for fix_id in ids if fix_id not in crashing]
    waiting = _run_here(others, work, write, later=devices is not None)
    if waiting and devices is not None:
        with devices():
            for fix_id in waiting:
                try:
                    _show(fix_id, os.path.join(work, f"{fix_id}-rig"), write, on_rig=True)
                except NeedsDevice as reason:
                    write(
                        event="cannot reproduce", id=fix_id, text=f"{reason}, and the rig has no such device"
                    )
    _run_here(crashing, work, write, later=False)


def _run_here(ids: Iterable[str], work: str, write: Callable[..., None], later: bool) -> list[str]:
    """Run cases on this machine's devices.

    Returns:
        With ``later``, the cases that need other devices; without it, they are reported as "cannot reproduce".
    """
    waiting = []
    for fix_id in ids:
        try:
            _show(fix_id, os.path.join(work, fix_id), write)
        except NeedsDevice as reason:
            if later:
                waiting.append(fix_id)
            else:
                write(event="cannot reproduce", id=fix_id, text=str(reason), needs_device=True)
    return waiting


def _show(fix_id: str, folder: str, write: Callable[..., None], on_rig: bool = False) -> None:
    """Run one case and write its events.

    Raises:
        NeedsDevice: the case needs a CUDA device.
    """
    write(event="begin", id=fix_id, text="")
    os.makedirs(folder, exist_ok=True)
    try:
        said = _case(fix_id)(folder)
        _wait_for_devices()  # what went wrong there is this case's, not the next one's
    except (NeedsDevice, KeyboardInterrupt, SystemExit):
        raise
    except CannotReproduce as reason:
        write(event="cannot reproduce", id=fix_id, text=str(reason))
    except BaseException as error:  # torch's CheckpointException is no Exception
        write(event="bug", id=fix_id, text=_said(error), on_rig=on_rig, unable=is_unable(error))
        if _is_device_lost():
            os._exit(0)  # the parent goes on with the next case in a new process
    else:
        write(event="right", id=fix_id, text=said or "right", on_rig=on_rig)


def _wait_for_devices() -> None:
    """Wait for all that the case gave the devices to do; raises what went wrong there."""
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            module.synchronize()


def _is_device_lost() -> bool:
    """Whether no operation of this process works on its devices any more, as after an illegal memory access."""
    try:
        _wait_for_devices()
    except RuntimeError:
        return True
    return False


def is_unable(error: BaseException) -> bool:
    """Whether a library is missing or too old for the case, or the rig has no code for it."""
    text = str(error)
    return (isinstance(error, ImportError) and "pip install" in text) or NO_CODE in text


def _said(error: BaseException) -> str:
    """The text of an error: class and message as upstream raised it, only the message for our own assertions."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    ours = frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith(f"{__package__}.")
    return str(error) if ours and isinstance(error, AssertionError) and str(error) else say(error)


def _case(fix_id: str) -> Callable[[str], str | None]:
    module = _loaded(fix_id)
    if module is None:
        raise CannotReproduce("this release of diffusers_quantfix brings no case for it")
    case: Callable[[str], str | None] = module.case
    return case


def _may_crash(fix_id: str) -> bool:
    with contextlib.suppress(Exception):  # the case will report it
        return bool(getattr(_loaded(fix_id), "MAY_CRASH", False))
    return False


def _loaded(fix_id: str) -> ModuleType | None:
    name = case_module(fix_id)
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


if __name__ == "__main__":
    main(*sys.argv[1:])
