"""One measurement in a process of its own; see `measure.child`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import diffusers_quantfix  # noqa: F401  # activates, or not, as the variable says


def main() -> None:
    function, arguments, answer, folder = sys.argv[1:]
    module, _, name = function.partition(":")
    from .measure import CannotMeasure

    try:
        said = {
            "answer": getattr(importlib.import_module(f"tests.benchmarks.{module}"), name)(
                *json.loads(arguments)
            )
        }
    except CannotMeasure as error:
        said = {"cannot": str(error)}
    Path(answer).write_text(json.dumps(said), encoding="utf-8")
    del folder


main()
