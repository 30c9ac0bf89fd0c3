"""The details of one fix, as `explain` prints them: read from its file alone, without importing a library."""

from __future__ import annotations

import re

from ..fixes import NAMES
from ..fixes.targets import declaration, fix_module
from ..text import wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..engine.board import Answer
    from ..engine.fix import Target

_PACKAGE = __name__.partition(".")[0]


def explanation(fix_id: str) -> str:
    """The docstring of a fix's file, from its source where the interpreter drops docstrings (``-OO``)."""
    import inspect

    module = fix_module(fix_id)
    text = module.__doc__
    if text is None:
        import ast

        loader = module.__spec__.loader if module.__spec__ else None
        source = loader.get_source(module.__name__) if hasattr(loader, "get_source") else None  # type: ignore[union-attr]
        text = ast.get_docstring(ast.parse(source)) if source else ""
    return inspect.cleandoc(text or "")


def page_data(fix_id: str, answer: Answer | None = None) -> dict[str, Any]:
    """The page for machines; with ``state``, ``reason`` and ``changes`` if an answer of the board is passed."""
    from ..engine.versions import judge

    fix = declaration(fix_id)
    target = target_of(fix_id)
    verdict = judge(target.claims)
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
        "text": explanation(fix_id),
        "versions": {"kind": verdict.kind, "reason": verdict.reason},
        "targets": [
            {"id": one.name, "module": one.module, "claims": dict(one.claims), "fixed_in": one.fixed_in}
            for one in fix.targets
        ],
    }
    if answer is not None:
        data.update(state=answer.state, reason=answer.reason, changes=list(answer.changes))
    return data


def target_of(name: str) -> Target:
    """The target of that name; of a fix with several, the first that the installed releases have."""
    from ..engine.versions import judge

    meant = [target for target in declaration(name).targets if target.name in NAMES[name]]
    return next((target for target in meant if judge(target.claims).fits), meant[0])


def page(fix_id: str, answer: Answer | None = None) -> list[str]:
    """The lines of the page of one fix.

    Args:
        fix_id: its id, or the name of one of its targets.
        answer: the board's answer for it; without it the page states what follows from the installed versions.
    """
    data = page_data(fix_id, answer)
    changes = ", ".join(data.get("changes", ()))
    modules = ", ".join(one["module"] for one in data["targets"])
    several = len(data["targets"]) > 1
    rows = [
        ("symptom", data["symptom"]),
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
        ("here", _here(data, fix_id)),
        ("switch off", f"DIFFUSERS_QUANTFIX=skip:{fix_id}, or qf.revert({fix_id!r})"),
        *(("choose", f"DIFFUSERS_QUANTFIX={option}: {what}") for option, what in data["options"].items()),
        *(("upstream", link) for link in data["upstream"] or ("not reported yet",)),
    ]
    head = fix_id if fix_id == data["id"] else f"{fix_id}: a target of {data['id']}"
    lines = [head, "", *_flowed(data["text"]), ""]
    for name, value in rows:
        lines += wrapped(value, f"{name:<17}", " " * 17)
    return lines


def affected(claims: dict[str, str]) -> str:
    """A claim for people."""
    return " and ".join(f"{name} {claim or '(any version)'}" for name, claim in claims.items())


def _fixed(target: dict[str, Any]) -> str:
    return f"fixed in {target['fixed_in']}" if target["fixed_in"] else "fixed in no release yet"


def _here(data: dict[str, Any], fix_id: str) -> str:
    if "state" in data:
        return f"{data['state']}: {data['reason']}"
    kind, reason = data["versions"]["kind"], data["versions"]["reason"]
    if kind == "fits":
        return (
            f"{reason}: in the affected range; `python -m {_PACKAGE} explain {fix_id} --here` imports "
            "the library and checks whether it is patched"
        )
    return f"not affected: {reason}" if kind == "out-of-range" else str(reason)


def _flowed(text: str) -> list[str]:
    """A docstring wrapped to our width: its paragraphs, and the entries in them ("Symptom: " and so on)."""
    lines: list[str] = []
    for paragraph in text.replace("``", "`").split("\n\n"):
        for entry in re.split(r"\n(?=[A-Z][a-z]+: )", paragraph):
            titled = re.match(r"[A-Z][a-z]+: ", entry)
            lines += wrapped(" ".join(entry.split()), "", "    " if titled else "")
        lines.append("")
    return lines[:-1]
