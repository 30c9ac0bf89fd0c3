"""Run inside a cell, in a process that is thrown away: does every fix still meet what it expects?

The bare side's process forks for it after its last test, when all libraries are imported already; by hand:

    DIFFUSERS_QUANTFIX=off python -m tests.upstream.inspect_fixes REPORT [--try-candidates]

For each fix: does the claim fit, does the target module exist, what does the probe say, and where it says broken: does
``patch`` find every slot, does what it writes accept every call that upstream's own accepts, does the probe say
healthy then, and is everything back after the undo?
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
import sys
from pathlib import Path
from types import CodeType
from typing import Any

from diffusers_quantfix.engine.errors import TargetMissing
from diffusers_quantfix.engine.fix import Target
from diffusers_quantfix.engine.ledger import Entry, Ledger
from diffusers_quantfix.engine.versions import judge
from diffusers_quantfix.fixes.targets import TARGETS, fix_module
from tests.gate import probe

P = inspect.Parameter


def inspect_fix(fix: Any, target: Target, try_candidates: bool = False) -> dict[str, Any]:
    """What one fix meets here.

    Args:
        fix: the module of the fix: ``FIX``, ``broken``, ``patch``.
        target: the one to inspect.
        try_candidates: patch also where the probe says broken outside of the claim.

    Returns:
        ``claims``; ``claim`` ("fits", "out-of-range", "missing", "unreadable"), ``why``, ``probe`` ("broken",
        "healthy", "missing", "absent", "failed"), ``patch`` ("" when not tried, "ok", or what went wrong), ``slots``.
    """
    verdict = judge(target.claims)
    said = {"claim": verdict.kind, "why": verdict.reason, "probe": "", "detail": "", "patch": "", "slots": []}
    said["claims"] = target.claims
    if verdict.kind == "missing":
        return said
    try:
        module = importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        return said | {"probe": "absent", "detail": f"no module {error.name}"}
    except Exception as error:
        return said | {"probe": "failed", "detail": f"{target.module} cannot be imported: {_say(error)}"}
    try:
        said["probe"] = "broken" if probe(fix, module) else "healthy"
    except TargetMissing as gone:
        return said | {"probe": "missing", "detail": str(gone)}
    except Exception as error:
        return said | {"probe": "failed", "detail": f"the probe raised {_say(error)}"}
    if said["probe"] == "broken" and (verdict.fits or try_candidates):
        said["patch"], said["slots"] = _try_patch(fix, module)
    return said


def _try_patch(fix: Any, module: Any) -> tuple[str, list[str]]:
    ledger = Ledger({module.__name__.partition(".")[0]})  # repairs copies of functions in other modules, too
    draft = ledger.draft(fix.FIX.id)
    try:
        fix.patch(module, draft)
    except TargetMissing as gone:
        return f"the target moved: {gone}", []
    except Exception as error:
        return f"patch raised {_say(error)}", []
    slots = list(dict.fromkeys(entry.where for entry in draft.entries))
    if not slots:
        return "patch wrote nothing", slots
    misfits = [sentence for entry in draft.entries if (sentence := misfit(entry))]
    if misfits:
        return "; ".join(misfits), slots
    try:
        ledger.commit(draft)
        if not fix.FIX.asked_once and probe(fix, module):
            return "the probe still says broken after the patch", slots
    except Exception as error:
        return f"after the patch: {_say(error)}", slots
    finally:
        ledger.undo(fix.FIX.id)
    return ("ok" if probe(fix, module) else "the probe says healthy after everything was put back"), slots


def misfit(entry: Entry) -> str:
    """Why what we write could not take a call that upstream's own takes, as a sentence; empty when it can."""
    if isinstance(entry.old, CodeType) or isinstance(entry.new, CodeType):
        old, new = entry.old, entry.new
        same = (
            isinstance(new, CodeType)
            and old.co_varnames[: _arguments(old)] == new.co_varnames[: _arguments(new)]
        )
        return "" if same else f"{entry.where}: the exchanged code takes other arguments"
    if isinstance(entry.old, ctypes._CFuncPtr):  # Python 3.13 says (*args, **kwargs) of each of them
        return ""
    try:
        old = inspect.signature(_plain(entry.old))  # what upstream means, behind its own decorators
        new = inspect.signature(_plain(entry.new), follow_wrapped=False)
    except (TypeError, ValueError):
        return ""  # a value, or a function of C
    problem = narrower(old, new)
    return f"{entry.where}{old} is replaced by {new}: {problem}" if problem else ""


def narrower(old: inspect.Signature, new: inspect.Signature) -> str:
    """What the new signature cannot take of the old one; empty when it takes everything."""
    kinds = {parameter.kind for parameter in new.parameters.values()}
    any_position, any_keyword = P.VAR_POSITIONAL in kinds, P.VAR_KEYWORD in kinds
    positions = [
        p.name for p in new.parameters.values() if p.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)
    ]
    keywords = {
        p.name for p in new.parameters.values() if p.kind in (P.KEYWORD_ONLY, P.POSITIONAL_OR_KEYWORD)
    }
    for index, parameter in enumerate(old.parameters.values()):
        name, kind = parameter.name, parameter.kind
        if kind is P.VAR_POSITIONAL:
            if not any_position:
                return f"it takes no *{name}"
        elif kind is P.VAR_KEYWORD:
            if not any_keyword:
                return f"it takes no **{name}"
        elif kind is P.KEYWORD_ONLY:
            if name not in keywords and not any_keyword:
                return f"it takes no keyword {name}"
        else:
            if index < len(positions):
                here = positions[index]
                # self may have any name: nobody passes it by keyword
                if here != name and index and not (any_keyword and here not in old.parameters):
                    return f"argument {index + 1} is {here}, not {name}"
            elif not any_position:
                return f"it takes no argument {name} by position"
            elif name not in keywords and not any_keyword and kind is P.POSITIONAL_OR_KEYWORD:
                return f"it takes no keyword {name}"
    for parameter in list(new.parameters.values())[1:]:
        variable = parameter.kind in (P.VAR_POSITIONAL, P.VAR_KEYWORD)
        if variable or parameter.default is not P.empty or parameter.name in old.parameters:
            continue
        if len(positions) > len(old.parameters) or parameter.kind is P.KEYWORD_ONLY:
            return f"it insists on {parameter.name}"
    return ""


def _plain(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value


def _arguments(code: CodeType) -> int:
    return code.co_argcount + code.co_kwonlyargcount


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def main(report: str, *flags: str) -> None:
    """Inspect every target of the index and write one JSON object."""
    found = {}
    for name, target in TARGETS.items():
        try:
            found[name] = inspect_fix(fix_module(name), target, "--try-candidates" in flags)
        except Exception as error:
            found[name] = {"claim": "unreadable", "why": "", "probe": "failed", "detail": _say(error),
                             "patch": "", "slots": []}  # fmt: skip
    Path(report).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
