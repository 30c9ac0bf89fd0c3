"""The process in which the cases run: ``python -m diffusers_quantfix.verify.child results work id...``.

Results go to a file, one JSON line per event, since the libraries print what they like.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from ..engine.target import say
from .case import CannotShow


def case_module(fix_id: str) -> str:
    """The module that holds the case of a fix."""
    return f"{__package__}.cases.{fix_id.replace('-', '_')}"


def main(results: str, work: str, ids: list[str]) -> None:
    """Run the cases in order and write what each of them said."""
    with open(results, "a", encoding="utf-8") as file:

        def write(**event: str) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()  # the parent shows the progress, and must know where we were if we die

        for fix_id in ids:
            write(id=fix_id, event="begin", text="")
            folder = os.path.join(work, fix_id)
            os.makedirs(folder, exist_ok=True)
            try:
                said = importlib.import_module(case_module(fix_id)).case(folder)
            except CannotShow as reason:
                write(id=fix_id, event="cannot show", text=str(reason))
            except Exception as error:
                write(id=fix_id, event="defect", text=say(error))
            else:
                write(id=fix_id, event="right", text=said or "right")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
