"""The process in which the cases run: ``python -m diffusers_quantfix.verify.child results work``.

It imports the libraries, says what the board says, reads one line of ids from standard input, and runs their cases in
that order.  What it says goes to the file ``results``, one JSON line per event, since the libraries print what they
like.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys

from ..activation import status
from ..engine.target import say
from ..fixes import INDEX
from ..user_settings import settings
from .case import CannotShow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any


def case_module(fix_id: str) -> str:
    """The module that holds the case of a fix."""
    return f"{__package__}.cases.{fix_id.replace('-', '_')}"


def main(results: str, work: str) -> None:
    """Say the board, then run the cases that are asked for."""
    with open(results, "a", encoding="utf-8") as file:

        def write(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()  # the parent shows the progress, and must know where we were if we die

        if settings().off:
            _import_the_libraries()
            write(event="ready")
        else:
            write(event="ready", board=status().to_dict())
        _run(sys.stdin.readline().split(), work, write)


def _import_the_libraries() -> None:
    """What `status` imports to answer: this side would do it in its first case, while the other side is done."""
    for target in dict.fromkeys(target for _, target in INDEX.values()):
        with contextlib.suppress(Exception):  # not installed, or broken: the case will say so
            importlib.import_module(target)


def _run(ids: Iterable[str], work: str, write: Callable[..., None]) -> None:
    for fix_id in ids:
        write(event="begin", id=fix_id, text="")
        folder = os.path.join(work, fix_id)
        os.makedirs(folder, exist_ok=True)
        try:
            said = _case(fix_id)(folder)
        except CannotShow as reason:
            write(event="cannot show", id=fix_id, text=str(reason))
        except Exception as error:
            write(event="defect", id=fix_id, text=say(error))
        else:
            write(event="right", id=fix_id, text=said or "right")


def _case(fix_id: str) -> Callable[[str], str | None]:
    name = case_module(fix_id)
    if importlib.util.find_spec(name) is None:
        raise CannotShow("this release of diffusers_quantfix brings no demonstration of it")
    case: Callable[[str], str | None] = importlib.import_module(name).case
    return case


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
