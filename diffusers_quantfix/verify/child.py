"""The process in which the cases run: ``python -m diffusers_quantfix.verify.child results work [id ...]``.

It imports the libraries, reports the board, reads one line of ids from standard input, and runs their cases in that
order.  It writes its events to the file ``results``, one JSON line each, since the libraries may print anything.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile

from ..activation import status
from ..engine.board import WAITING
from ..engine.target import import_target, say
from ..fixes import INDEX
from ..user_settings import settings
from .case import CannotReproduce

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any


def case_module(fix_id: str) -> str:
    """The module that holds the case of a fix."""
    return f"{__package__}.cases.{fix_id.replace('-', '_')}"


def main(results: str, work: str, *ids: str) -> None:
    """Report the board, then run the requested cases; with ids, import only their libraries."""
    with open(results, "a", encoding="utf-8") as file:

        def write(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()  # the parent shows the progress, and must know the current case if we die

        if settings().off:
            _import_the_libraries(ids)
            write(event="ready")
        else:
            write(event="ready", board=_board(ids))
        _keep_out_of_the_build_folders(work)
        _run(sys.stdin.readline().split(), work, write)


def _targets(ids: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(INDEX[fix_id][1] for fix_id in ids or INDEX))


def _board(ids: tuple[str, ...]) -> dict[str, Any]:
    """The board; for fixes other than these only what is known without their libraries."""
    if not ids:
        return status().to_dict()
    faults = {target: import_target(target) for target in _targets(ids)}
    board: dict[str, Any] = status(load=False).to_dict()
    for answer in board["fixes"]:
        state, reason = faults.get(answer["module"], ("", ""))
        if state and answer["state"] == WAITING:
            answer.update(state=state, reason=reason)
    return board


def _import_the_libraries(ids: Iterable[str]) -> None:
    """Import what the board imports; otherwise this side would do so in its first case, after the other side."""
    for target in _targets(ids):
        with contextlib.suppress(Exception):  # not installed, or broken: the case will report it
            importlib.import_module(target)


def _keep_out_of_the_build_folders(work: str) -> None:
    """While the cases run, load quanto's extensions from copies, or not at all.

    quanto compiles within its own package. A process that is killed meanwhile (ours has a time limit) leaves a lock
    there, and every later program waits for it. What is compiled already is copied. Nothing is compiled for a case: it
    takes longer than all cases together, and no case is about it.
    """
    home = "optimum.quanto.library.extensions."
    for name in [name for name in sys.modules if name.startswith(home)]:
        extension = getattr(sys.modules[name], "ext", None)
        if extension is None or getattr(extension, "_lib", None) is not None:
            continue
        import torch

        from ..weights.quanto_extension import StandIn

        copy = tempfile.mkdtemp(prefix=f"{extension.name}-", dir=work)
        if _copied(extension.build_directory, copy, torch.__version__):
            extension.build_directory = copy
        else:
            extension._lib = StandIn(extension.name, "is not compiled for verify")


def _copied(folder: str, copy: str, version: str) -> bool:
    """Copy what was compiled for this torch to its end; False where there is none."""
    try:
        with open(os.path.join(folder, "pytorch_version.txt")) as file:
            if file.read().rstrip() != version or os.path.exists(os.path.join(folder, "lock")):
                return False
        shutil.copytree(folder, copy, dirs_exist_ok=True)  # with the times of the files, at which ninja looks
    except OSError:
        return False
    return not os.path.exists(os.path.join(copy, "lock"))


def _run(ids: Iterable[str], work: str, write: Callable[..., None]) -> None:
    for fix_id in ids:
        write(event="begin", id=fix_id, text="")
        folder = os.path.join(work, fix_id)
        os.makedirs(folder, exist_ok=True)
        try:
            said = _case(fix_id)(folder)
        except CannotReproduce as reason:
            write(event="cannot reproduce", id=fix_id, text=str(reason))
        except Exception as error:
            write(event="defect", id=fix_id, text=say(error))
        else:
            write(event="right", id=fix_id, text=said or "right")


def _case(fix_id: str) -> Callable[[str], str | None]:
    name = case_module(fix_id)
    if importlib.util.find_spec(name) is None:
        raise CannotReproduce("this release of diffusers_quantfix brings no case for it")
    case: Callable[[str], str | None] = importlib.import_module(name).case
    return case


if __name__ == "__main__":
    main(*sys.argv[1:])
