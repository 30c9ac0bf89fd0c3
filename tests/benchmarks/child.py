"""Measurements in a process of their own; see `measure.children`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import diffusers_quantfix  # noqa: F401  # activates, or not, as the variable says


def main() -> None:
    """Make each call and write its answer as one line, at once: a later call may end this process."""
    calls, answers = sys.argv[1:]
    with Path(answers).open("a", encoding="utf-8") as file:
        for function, *arguments in json.loads(calls):
            file.write(json.dumps(_said(function, arguments)) + "\n")
            file.flush()


def _said(function: str, arguments: list[Any]) -> dict[str, Any]:
    from .measure import CannotMeasure

    module, _, name = function.partition(":")
    try:
        return {"answer": getattr(importlib.import_module(f"tests.benchmarks.{module}"), name)(*arguments)}
    except CannotMeasure as error:
        return {"cannot": str(error)}
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return {"failed": f"{function} failed: {type(error).__name__}: {first}"}


main()
