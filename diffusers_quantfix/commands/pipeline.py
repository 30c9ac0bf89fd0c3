"""``explain PIPELINE``: what has been proved about a quantized pipeline, what is refused and why."""

from __future__ import annotations

from ..advisories import pipelines
from ..engine.versions import installed_version
from ..text import wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..advisories.pipelines import Tested

_SHOWN = 4  # variants that are named


def answer(words: str) -> dict[str, Any] | None:
    """The answer for a pipeline as data; None if the words are not a pipeline's name.

    Returns:
        ``pipeline`` (its class), ``release`` (of diffusers, that was tested), ``installed`` (version or None),
        ``lacking`` (whether that one was tested and does not have it), ``versions`` (of that run), ``proved`` (backend
        -> placements), ``refused`` (dictionaries with ``backend``, ``placement``, ``reason``, and ``unquantized``:
        whether the un-quantized pipeline fails alike), ``not_run`` (backends), ``not_built`` (why no instance could be
        tested, or an empty string) and ``variants`` (classes).
    """
    if not pipelines.may_name(words):
        return None
    data = pipelines.read()
    name = pipelines.find(words, data)
    if not name:
        return None
    installed = installed_version("diffusers")
    tested = pipelines.tested(name, data, installed)
    return {
        "pipeline": name,
        "release": tested.release,
        "installed": installed,
        "lacking": tested.lacking,
        "versions": tested.versions,
        "proved": _proved(tested),
        "refused": [
            {
                "backend": one.backend,
                "placement": one.placement,
                "reason": one.reason,
                "unquantized": one.sign == pipelines.UPSTREAM,
            }
            for one in tested.outcomes
            if one.sign != pipelines.EXACT
        ],
        "not_run": tested.not_run,
        "not_built": tested.not_built,
        "variants": pipelines.relatives(name, data),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The answer as text: a table of placements by backend, the reason for each refusal, and variants.

    Args:
        found: of `answer`.
    """
    rows = wrapped(f"{found['pipeline']}, quantized, {_where(found)}", "", "    ")
    if found["not_built"]:
        return rows + _entry("untested", f"no tiny instance of it runs in the tests: {found['not_built']}")
    shown = [one for one in found["refused"] if one["backend"] in pipelines.BACKENDS]
    reasons = list(dict.fromkeys(map(_reason, shown)))
    rows += _table(found, reasons)
    for number, reason in enumerate(reasons, 1):
        rows += _entry(f"refused {number}", reason)
    if found["not_run"] == ["gguf"] and "Modular" not in found["pipeline"]:
        rows += _entry("gguf", "diffusers reads none of its models from a GGUF file")
    rows += _entry(
        "proved",
        "with `import diffusers_quantfix` first: bit for bit the output of the same quantized pipeline that never "
        "moved, nothing left on the GPU; a tiny instance on stand-ins for GPUs, 4-bit as nf4, quanto and torchao as "
        "int8 weights",
    )
    if found["variants"]:
        named, more = found["variants"][:_SHOWN], len(found["variants"]) - _SHOWN
        rows += _entry("also", ", ".join(named) + (f" and {more} more" if more > 0 else ""))
    return rows


def _table(found: dict[str, Any], reasons: list[str]) -> list[str]:
    """A line for each group of placements that was run, a column for each backend."""
    refused = {(one["backend"], one["placement"]): one for one in found["refused"]}
    backends = [
        one for one in pipelines.BACKENDS if one in found["proved"] or any(one == of for of, _ in refused)
    ]
    rows = [_line("", [pipelines.BACKENDS[one] for one in backends])]
    for title, placements in pipelines.TOGETHER.items():
        cells = []
        for backend in backends:
            wrong = [refused[backend, one] for one in placements if (backend, one) in refused]
            numbers = sorted({reasons.index(_reason(one)) + 1 for one in wrong})
            proved = any(one in found["proved"].get(backend, ()) for one in placements)
            cells.append(
                ("partly " if proved else "no ") + ",".join(map(str, numbers))
                if wrong
                else "proved"
                if proved
                else "-"
            )
        if any(cell != "-" for cell in cells):
            rows.append(_line(title, cells))
    return rows


def _line(title: str, cells: list[str]) -> str:
    return f"{title.rstrip():<33}" + "".join(f"{cell:<9}" for cell in cells).rstrip()


def _reason(one: dict[str, Any]) -> str:
    return f"{one['reason']} (un-quantized too)" if one["unquantized"] else str(one["reason"])


def _proved(tested: Tested) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in tested.outcomes:
        if one.sign == pipelines.EXACT:
            found.setdefault(one.backend, []).append(one.placement)
    return found


def _where(found: dict[str, Any]) -> str:
    release, installed = found["release"], found["installed"]
    if installed is None:
        return f"on diffusers {release} (not installed here)"
    if installed == release:
        return f"on diffusers {release}, which is installed"
    if found["lacking"]:
        return f"on diffusers {release}; {installed}, which is installed, does not have it"
    return f"on diffusers {release}, the nearest tested release to the installed {installed}"


def _entry(title: str, sentence: str) -> list[str]:
    return wrapped(sentence, f"{title:<10} ", " " * 11, break_words=True)
