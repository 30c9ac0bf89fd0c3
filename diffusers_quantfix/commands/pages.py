"""The details of one fix, as `explain` prints them: read from its file alone, without importing a library."""

from __future__ import annotations

import re

from ..fixes import NAMES
from ..fixes.targets import declaration
from ..text import wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..engine.board import Answer
    from ..engine.fix import Target

_COMMAND = "python -m diffusers_quantfix"


def page_data(
    fix_id: str, answer: Answer | None = None, stated: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The page as data; with ``state``, ``reason`` and ``changes`` if an answer of the board is passed.

    Args:
        fix_id: its id.
        answer: the board's answer for it; without it the page states what follows from versions.
        stated: releases that take precedence over the installed ones, such as those in a pasted text.
    """
    from ..engine.versions import installed_version, judge

    fix = declaration(fix_id)
    target = target_of(fix_id, stated)
    stated = {name: version for name, version in (stated or {}).items() if name in target.claims}
    verdict = judge(target.claims, lambda name: stated.get(name) or installed_version(name))
    data: dict[str, Any] = {
        "id": fix.id,
        "title": fix.title,
        "module": target.module,
        "claims": dict(target.claims),
        "upstream": list(fix.upstream),
        "symptom": fix.symptom,
        "fixed_in": target.fixed_in,
        "hot": fix.hot,
        "options": fix.options,
        "text": (fix.text or "").strip(),
        "relies_on": sorted({piece for one in fix.targets for piece in _relies_on(one)}),
        "versions": {"kind": verdict.kind, "reason": verdict.reason, "stated": stated},
        "targets": [
            {"id": one.name, "module": one.module, "claims": dict(one.claims), "fixed_in": one.fixed_in}
            for one in fix.targets
        ],
    }
    if answer is not None:
        data.update(state=answer.state, reason=answer.reason, changes=list(answer.changes))
    above = verdict.above and not target.fixed_in
    data["here"], data["next"] = _here(data, above), _next(data, above)
    return data


def target_of(name: str, stated: Mapping[str, str] | None = None) -> Target:
    """The target with that name; for a fix with several, the first that affects the installed releases, or
    ``stated``."""
    from ..engine.versions import installed_version, judge

    def known(distribution: str) -> str | None:
        return (stated or {}).get(distribution) or installed_version(distribution)

    meant = [target for target in declaration(name).targets if target.name in NAMES[name]]
    return next((target for target in meant if judge(target.claims, known).fits), meant[0])


def head(data: Mapping[str, Any]) -> list[str]:
    """What a person in trouble needs: which bug it is, whether this machine has it, and what to do.

    Args:
        data: of `page_data`.
    """
    lines = wrapped(f"{data['id']}: {data['title']}", "", "    ")
    lines += wrapped(data["here"], f"{'here':<7}", " " * 7)
    for number, step in enumerate(data["next"]):
        lines += wrapped(step, f"{'' if number else 'do':<7}", " " * 7)
    return lines


def page(fix_id: str, answer: Answer | None = None) -> list[str]:
    """The lines of the page of one fix, what to do first.

    Args:
        fix_id: its id, or the name of one of its targets.
        answer: the board's answer for it; without it the page states what follows from the installed versions.
    """
    data = page_data(fix_id, answer)
    changes = ", ".join(data.get("changes", ()))
    modules = ", ".join(one["module"] for one in data["targets"])
    several = len(data["targets"]) > 1
    rows = [
        *(
            (
                ("affected", f"{one['id']}: {affected(one['claims'])}; {_fixed(one)}")
                for one in data["targets"]
            )
            if several
            else (
                ("affected", affected(data["claims"])),
                ("fixed upstream", data["fixed_in"] or "in no release yet"),
            )
        ),
        (
            "patches",
            changes
            or (f"nothing here; its target{'s are' if several else ' is'} {modules}" if answer else modules),
        ),
        *((("relies on", _some(data["relies_on"])),) if data["relies_on"] else ()),
        ("switch off", f"DIFFUSERS_QUANTFIX=skip:{fix_id}, or qf.revert({fix_id!r})"),
        *(("choose", f"DIFFUSERS_QUANTFIX={option}: {what}") for option, what in data["options"].items()),
    ]
    named = fix_id if fix_id == data["id"] else f"{fix_id} (a target of {data['id']})"
    first = head({**data, "id": named})
    _, _, text = data["text"].partition("\n\n")  # its first line is the title
    lines = [*first, "", *_flowed(text), ""]
    for name, value in rows:
        lines += wrapped(value, f"{name:<17}", " " * 17)
    return lines


def affected(claims: Mapping[str, str]) -> str:
    """A claim as text."""
    return " and ".join(f"{name} {claim or '(any version)'}" for name, claim in claims.items())


def _relies_on(target: Target) -> list[str]:
    """The names of the library code that a target relies on, as recorded."""
    from ..engine.code_marks import CALLED
    from ..engine.proofs import Proofs
    from ..fixes.targets import PACKAGES, PROVED_CODE

    proofs = Proofs(PROVED_CODE, PACKAGES, lambda owner, name, value: value)
    return [piece.removesuffix(CALLED) for piece in proofs.pieces(target.name)]


def _some(pieces: list[str]) -> str:
    more = f" and {len(pieces) - 6} more (`--json` has all)" if len(pieces) > 6 else ""
    return ", ".join(pieces[:6]) + more


def _fixed(target: Mapping[str, Any]) -> str:
    return f"fixed in {target['fixed_in']}" if target["fixed_in"] else "fixed in no release yet"


def _here(data: Mapping[str, Any], above: bool) -> str:
    if "state" in data:
        return f"{data['state']}: {data['reason']}"
    kind, reason = data["versions"]["kind"], data["versions"]["reason"]
    source = " (the versions in your text)" if data["versions"]["stated"] else ""
    if kind == "fits":
        return f"affected: {reason}{source}"
    if kind == "out-of-range":
        return f"{'may be affected' if above else 'not affected'}: {reason}{source}"
    return f"unknown: {reason}"


def _next(data: Mapping[str, Any], above: bool) -> list[str]:
    """What to do now, one sentence each."""
    kind, fix_id = data["versions"]["kind"], data["id"]
    state = data.get("state", "")
    if state.startswith("applied"):
        return ["nothing: it is patched in this environment wherever `import diffusers_quantfix` comes first"]
    if state in ("healthy", "out-of-range") or (not state and kind == "out-of-range" and not above):
        return [
            "nothing to patch: your error is probably another bug, unless it comes from a machine with other releases "
            f"(paste its `pip freeze` below the error and run `{_COMMAND} explain -`)"
        ]
    if kind == "missing":
        return [
            f"run this with the interpreter that has the libraries, or `{_COMMAND} check` your pinned versions"
        ]
    if kind == "out-of-range":
        return [
            "put `import diffusers_quantfix` first in the program: this release was not tested; the bug is patched "
            f"if all code that the fix relies on is unchanged, else with DIFFUSERS_QUANTFIX=newer:{fix_id}"
        ]
    steps = ["put `import diffusers_quantfix` first in the program: it patches this bug"]
    if state:
        steps = [f"it is not patched here: {state}; `{_COMMAND} status --only {state}` says more"]
    if data["fixed_in"]:
        steps.append(f"or upgrade: {data['fixed_in'].replace(' with ', ' and ')} fixes it")
    if not data["versions"]["stated"]:
        steps.append(f"to see that it works: `{_COMMAND} verify {fix_id}`")
    return steps


def _flowed(text: str) -> list[str]:
    """A docstring wrapped to our width: its paragraphs, and the entries in them ("Symptom: " and so on)."""
    lines: list[str] = []
    for paragraph in text.replace("``", "`").split("\n\n"):
        for entry in re.split(r"\n(?=[A-Z][a-z]+: )", paragraph):
            titled = re.match(r"[A-Z][a-z]+: ", entry)
            lines += wrapped(" ".join(entry.split()), "", "    " if titled else "")
        lines.append("")
    return lines[:-1]
